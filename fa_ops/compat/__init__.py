"""Names and argument orders of other libraries, for code that was written for them."""
