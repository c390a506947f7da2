"""Vision encoders from mmproj files: declared like models, whole on one device. No torch at run
time."""
