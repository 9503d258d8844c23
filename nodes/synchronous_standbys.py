"""Sessions whose transaction has ended on its server but not on its synchronous standbys.

Its changes and locks stay until the standbys have it. Ending the session would end the wait, too, but its client relies
on the standbys.
"""

from __future__ import annotations

# The wait event of such a session, which is in COMMIT, PREPARE or COMMIT PREPARED.
SYNC_REP = "SyncRep"
# How messages describe it, and the remedy.
AWAITS_STANDBYS = "which waits for synchronous standbys"
END_STANDBYS_WAIT = "bring the standbys back, change synchronous_standby_names"
