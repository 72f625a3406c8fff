"""GPU kernels that gather and scatter paged KV, and their loader. Importing this loads no library."""
