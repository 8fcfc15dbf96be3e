"""Examples wherever they live: in memory, in files, from functions, on a Dask cluster."""
