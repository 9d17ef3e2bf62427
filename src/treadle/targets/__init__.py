"""The properties and capabilities of each kind of device. No other room reads the name of a
device."""
