"""What ranks of the tests run: pieces of Python without torch."""

SLEEPS = "import time; time.sleep(600)"

MOVES = """
import os, time
from pathlib import Path
from megascale.events import Completed, Issued, ProgressWriter
page = ProgressWriter(Path(os.environ["MEGASCALE_PROGRESS_PAGE"]))
for step in range(1, 100000):
    page.issued(Issued(int(os.environ["MEGASCALE_EPOCH"]), step, "forward", time.monotonic_ns()))
    page.completed(Completed(step, "backward"))
    time.sleep(0.02)
"""

FAMILY = """
import os, subprocess, sys, time
folder = sys.argv[0].rpartition("/")[0]
sleeper = "import time; time.sleep(600)"
def note(pid):
    with open(folder + "/family", "a") as file:
        file.write(f"{pid}\\n")
def start(**how):
    note(subprocess.Popen([sys.executable, "-c", sleeper], **how).pid)
start()
start(start_new_session=True)
if os.fork() == 0:  # a child that leaves a grandchild in a session of its own behind
    os.setsid()
    start()
    os._exit(0)
os.wait()
note(os.getpid())
"""

IGNORES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(__file__ + ".ready", "w").close()
time.sleep(600)
"""

SAVES = """
import signal, sys, time
def save(*_):
    time.sleep(1.5)  # longer than the grace of one that is not to save
    open(__file__ + ".saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(__file__ + ".ready", "w").close()
while True:
    time.sleep(0.05)
"""
