"""The process: signals, Qt libraries, garbage collection, crashes, single instance."""
