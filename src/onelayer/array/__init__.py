"""Arrays of any backend: namespaces, devices, threads, linear algebra, blocks."""
