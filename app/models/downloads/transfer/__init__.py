"""The downloader: fetches files in pieces and resumes where it stopped; no Qt."""
