"""`aqnpipe doctor`: checks of this machine and of the requirements of a profile."""
