"""The rule `code`: runs the tests of a row against the code of a response in a sandbox.

The response's code and the tests are in two sandboxed processes. `candidate` answers calls over
a socket with plain data; `tester` holds the tests and reports to us on a separate channel.
"""
