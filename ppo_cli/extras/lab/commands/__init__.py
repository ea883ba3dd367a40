"""The commands of extras/lab; entry points name them through `plugin`."""
