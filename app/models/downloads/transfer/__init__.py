"""The downloader: fetches files in pieces, and goes on where it stopped. It knows no Qt."""
