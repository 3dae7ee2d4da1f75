"""Questions about a program, which is traced to answer them. Nothing here knows of loss scaling."""
