"""The artifacts of a root on an object store, shared by any number of machines."""
