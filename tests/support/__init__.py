"""Parts that several tests, soaks and studies build on."""
