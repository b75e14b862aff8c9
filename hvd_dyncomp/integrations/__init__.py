"""Callbacks for frameworks, each in a file that imports its framework; nothing else imports these files."""
