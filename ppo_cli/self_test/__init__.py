"""`ppo doctor --self-test`: run the product's parts on these devices and compare their numbers.

`declarations` lists the checks, `runner` runs each in a process, `checks` holds what they compute.
"""
