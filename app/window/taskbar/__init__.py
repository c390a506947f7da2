"""The progress of loads and downloads at the window's place in the desktop's taskbar or dock.

Qt 6 has nothing for it: Linux desktops listen to a signal on D-Bus, Windows has an interface.
macOS would want a picture drawn over the whole icon, and stays without.
"""
