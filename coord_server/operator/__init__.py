"""The operator's command line and client; both speak REST."""
