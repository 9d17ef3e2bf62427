"""Which values to keep within so many bytes: alternatives to the minimum cut, as one problem."""
