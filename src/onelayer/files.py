"""Arrays in files: folders of .npy files, .zarr groups and HDF5 files as Dask arrays."""

from onelayer.data.files import dask_arrays

__all__ = ["dask_arrays"]
