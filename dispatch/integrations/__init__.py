"""Drop-in replacements for the calls that serving engines make today."""
