"""Times flash_ext beside the other attention libraries: python -m bench --help."""
