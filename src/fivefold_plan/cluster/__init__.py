"""Devices, links and clusters: data sheets, descriptions in TOML, and measured tables."""
