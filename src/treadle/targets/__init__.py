"""What each kind of device is and can do. Nothing else asks what a device is called."""
