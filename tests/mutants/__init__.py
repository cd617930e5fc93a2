"""Bugs to plant, one at a time, and the test that must notice each.

`python -m tests.mutants` (make mutants) plants each bug of the catalog and runs the test named for it.
A bug is a wrong twin of a public function, method, property or constant of rayk: it takes the place of the
right one when the module has been imported, in the process of the tests and in all that it starts.
"""
