"""Index arrays under the file names of the frameworks, and the sidecars that identify them."""
