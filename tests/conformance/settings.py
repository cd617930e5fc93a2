"""How long tests of the kit wait. Only what can never come is waited for in full."""

from rayk.conformance.rig import Settings

PATIENT = Settings(check_s=240.0, call_s=120.0, request_s=120.0, fault_s=1.5, grace_s=60.0)
"""For connectors that are right: however slow the machine."""
BRIEF = Settings(check_s=120.0, call_s=60.0, request_s=2.0, fault_s=1.0, grace_s=1.0)
"""For requests that are never reported."""
HANGING = Settings(check_s=120.0, call_s=5.0)
"""For calls that never return."""
IMPATIENT = Settings(check_s=240.0, call_s=120.0, request_s=120.0, fault_s=0.3, grace_s=60.0)
"""As PATIENT, but for what cannot succeed."""
