"""What runs on a machine and finds out what it is: standard library and pynvml, Python 3.9."""
