"""Attribution while a run trains: a recorder, what it keeps, and a guard over a target."""
