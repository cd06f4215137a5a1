"""Selection of a launch configuration, and hooks into serving engines."""
