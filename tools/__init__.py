"""Programs for the people who work on this repository; nothing here is installed or imported by the product."""
