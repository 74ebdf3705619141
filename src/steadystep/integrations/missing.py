"""A framework that is not installed."""


def install_line(package: str, extra: str, error: ImportError) -> ImportError:
    """What to raise instead: what is missing and how to get it."""
    return ImportError(f"this needs {package}: pip install 'steadystep[{extra}]' ({error})")
