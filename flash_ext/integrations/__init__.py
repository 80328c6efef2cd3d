"""flash_ext inside other libraries; each module imports its library only when it is used."""
