"""What every room needs: checks of arguments, and pytrees."""
