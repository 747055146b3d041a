"""Every English text of the page."""

TITLE = "ditkit"
SKIP = "Skip to the content"

TABS = {
    "": "Begin",
    "data": "Data",
    "settings": "Settings",
    "run": "Run",
    "queue": "Queue",
    "compare": "Compare",
}
"""The pages by path."""

STARTED = "page:     {address} (Ctrl-C ends it; runs go on)"
TUNNEL = "          from another computer: {command}, then open this address there"
PUBLIC = (
    "{host} is not only this machine: whoever has the address with its token can start programs "
    "here"
)
PORT_TAKEN = (
    "cannot listen at {host}:{port} ({reason}); choose another --port, or --port 0 for a free one"
)
NO_FAMILY = "no model family is installed; install ditkit-wan, ditkit-flux2 or ditkit-zimage"

NOT_OPENED = "{path} is in no folder that was opened; open its folder on the first page"
NO_FOLDER = "{path} is no folder; {remedy}"
OPEN_FOLDER = "Open {folder}"
REFUSED_HOST = "this page is for the computer itself: open it as localhost"
REFUSED_ORIGIN = "another site asked for this, and only the page itself may"
REFUSED_TOKEN = (
    "this page needs its token: open the address that ditkit-ui printed when it was started"
)

WHAT = "What do you want?"
MODEL = "Model"
EVERY_MODEL = "all models"
GPU = "GPU"
GPU_HELP = "Of this machine, or a name or size: rtx3060, 24GiB, 2x24GiB"
GPU_HERE = "Empty: this machine ({gpus})"
NO_GPU = "This machine has no GPU: runs can be planned and written here, and trained elsewhere."
FOLDER = "Folder of your pictures or clips"
FOLDER_HELP = "Captions are text files next to them: cat.png and cat.txt"
PROMISED = "for {machine}; at most {hours} h"
PLANNING = "planning …"
COSTS = "{peaks} GiB of the GPU, {host:.1f} GiB of the host, {hours} h by plan"
FITS = "Fits"
FITS_NOT = "Does not fit as set"
CHOOSE = "Choose"
FOLDER_FIRST = "Type the folder of your pictures or clips first."
NO_RECIPE = "No recipe for this; choose another model or goal."
DEMO = "Try it without a GPU"
DEMO_ABOUT = (
    "A whole run in minutes on this CPU, with a tiny model. Without a folder it writes pictures of "
    "its own."
)
DEMO_CHOOSE = "Try"
FILES = "Model files"
FILES_OF = "Model files that {recipe} needs"
LOOKING = "looking …"
COMFYUI = "Folder of ComfyUI"
COMFYUI_HELP = "Its files can be used instead"
USE_FILES = "Use these"
NOTHING_MISSING = "All are here."
FETCH = "Fetch"
FETCH_STATES = {
    "": "",
    "running": "Fetching, also while you look at another page.",
    "done": "Fetched.",
    "failed": "Not all could be fetched; the lines say why.",
    "stopped": "Stopped. What is complete stays; a new start fetches the rest.",
}
EXISTING = "Run files here"
NO_EXISTING = "None yet."
EXISTS = "{file} exists; open it below, or move it"
WRITTEN = "Written: {file}"
FAMILY_OF = "Command that reads it"

NO_FILE = "Choose or open a run file on the first page."
UNDO = "Undo"
UNDONE = "Undone."
NOTHING_TO_UNDO = "There is nothing to undo."

SEARCH_KEYS = "Search all {count} keys"
NO_KEY = "No key has these words."
DEFAULT = "default: {value}"
UNSET = "(default)"
RUN_FILE = "Run file"
RUN_FILE_HELP = "Edit here or in the form; both show the same file. It is saved when it is valid."
SAVED = "Saved."
NOT_SAVED = "Not saved: {error}"
CHANGED_ON_DISK = "{file} was changed by another program; load it again"
RELOAD = "Load again"
PLAN = "Plan"
PLAN_FOR = "Plan for GPU"
THIS_MACHINE = "this machine"
STEP = "{step} s a step, {time} for {steps} steps"
NO_TIME = "no time is known for this device"
STREAMED = "{size} GiB of weights stay on the host"
FIT = "Fit"
FIT_ABOUT = "Search settings that fit"
SEARCHING = "searching …"
FIT_CHANGES = "Would change"
FIT_NOTHING = "Nothing to change: it fits best as it is."
APPLY = "Apply"
BYTES_OF = {
    "weights": "weights",
    "adapters": "adapter",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "average": "average",
    "activations": "activations",
    "workspace": "workspace",
}
PEAK = "{peak} of {total} GiB on {name}"

READING = "reading the folder …"
COUNT = "{files} files, {usable} usable"
NOT_USABLE = ", {count} not usable"
NUM_LEFT_OUT = ", {count} left out"
NO_MEDIA = "No pictures or clips in {folder}."
REPLACE = "Replace in all captions"
FIND = "Find"
WITH = "Replace by"
REPLACED = "Replaced in {count} captions."
FOUND_NONE = "No caption contains this."
CAPTION_SAVED = "Caption saved: {file}"
CAPTION_CHANGED = "{file} was changed by another program meanwhile; load the page again"
NOT_UTF8 = "{file} is not shown: its name or its caption is not valid UTF-8; rename or correct it"
LEAVE_OUT, USE = "Leave out", "Use"
REMOVE_NAMES = "Remove the names that no file has"
LEFT_OUT = "left out by data.exclude"
IN_A_LIST = "{file} has the captions of this folder: edit them there ({reason})"
CAPTION_OF = "Caption of {name}"
PICTURE_OF = "Show {name} larger"
CROPS = ("Crop from left to right", "Crop from top to bottom")
CUT_AWAY = "{share} % cut away, trained as {width}×{height}"
TRAINED_AS = "trained as {width}×{height}"
CHECK = "Check the data"
CHECKING = "checking …"
NO_FINDINGS = "Nothing wrong was found."
FILTER = "Show only files with findings"
REMEDIES = {
    "data.on_bad": "Leave out",
    "data.short_clips": "Short clips",
    "data.buckets": "Crop otherwise",
    "data.max_aspect": "Crop otherwise",
    "data.bucket_step": "Crop otherwise",
    "data.height": "Other resolution",
    "data.resolutions": "Other resolution",
    "data.windows": "Use all of it",
    "data.captions": "Lines as captions",
    "data.trigger": "Trigger word",
}
"""What the remedy is that a setting brings, by its first key."""
SET = "Set"
SHORTEN = "Shorten the caption"
REMEDIED = "In the run file now: {settings}. Check the data again to see what remains."
BY_MODEL = "Captions by a model"
BY_MODEL_ABOUT = (
    "A vision-language model writes the captions that are missing. Read what it wrote before you "
    "train on it."
)
CAPTIONER = "Model: a hub id, or a folder"
CAPTION_GOAL = "What is to be learnt"
GOAL_BY_DATA = "edit or scene, by the data"
TRIGGER = "Trigger word"
INSTRUCTION = "Question in your words"
PRESENT_CAPTIONS = "Captions that are there"
REPLACES = {"": "stay", "model": "replace a model's", "all": "replace all"}
REPLACES_ASK = "Replace captions that are there?"
REPLACES_START = "Replace"
CANCEL = "Cancel"
PLAN_CAPTIONS = "How many, and does it fit?"
START_CAPTIONS = "Write captions"
STOP = "Stop"
CAPTION_STATES = {
    "": "",
    "running": "Captions are being written, also while you look at another page.",
    "done": "Captions are written.",
    "failed": "Some captions are not written; the lines say why.",
    "stopped": "Stopped. What is written stays; a new start writes the rest.",
}
JOB_RUNS = "one works already; stop it first"
MASK, REFERENCE = "mask", "reference"
CLOSE = "Close"

STATES = {
    "new": "Not started",
    "starting": "Starting",
    "waiting": "Waits in the queue, at position {position}",
    "running": "Training",
    "complete": "Complete at step {step}",
    "stopped": "Stopped at step {step}; it can be continued",
    "killed": "Killed at step {step}: its process is gone. Continue from the last save.",
    "failed": "Ended with an error; the last lines say which",
}
START = "Start"
CONTINUE = "Continue"
REQUESTS = {"sample": "Sample now", "save": "Save now", "stop": "Stop after this step"}
STARTED_RUN = "Started. It goes on when this page is closed."
LOG = "Last lines"
REPORT = "Page of the run"
OWN_PAGE = "Open in a tab of its own"
NO_REPORT = "The page of the run appears here after its first step."
COMMAND = "The same in a shell"
LONGER = "Steps of a longer run"
GO_ON = "Train on"

QUEUE_ADD = "Add {file}"
QUEUE_GPU = "GPU"
QUEUE_START = "Start a worker"
QUEUE_END = {"after": "End after this run", "stop": "Save and stop"}
QUEUE_ENDS = {
    "after": "The workers end after their present run.",
    "stop": "The workers save their run and end; it waits for the next worker.",
}
QUEUE_CLEAR = "Remove complete"
QUEUE_ABOUT = (
    "A worker trains these runs one after the other, and goes on when this page is closed. A "
    "failed run does not stop the next one; add it again to continue it."
)
QUEUE_WORKERS = "A worker trains on GPU {gpus}"
QUEUE_NO_WORKER = "No worker: the runs wait"
QUEUE_IDLE = "No worker"
ENDED = "the command ended with status {status}, and printed nothing"
QUEUE_EMPTY = "The queue is empty."
QUEUE_STEPS = "step {steps}"
QUEUE_LEFT = "{left} left"
QUEUE_STATES = {
    "waiting": "waits",
    "running": "trains",
    "complete": "complete",
    "failed": "failed",
    "stopped": "stopped",
}
QUEUE_MOVES = {-1: "Up", 1: "Down"}
QUEUE_REMOVE = "Remove"

STEP_OF = "Step"
LEFT, RIGHT = "Left", "Right"
PROMPT = "Prompt"
NO_SAMPLES = "No samples yet: set sample.prompts, or press Sample now on the page Run."
BEST = "best by validation"
SAMPLE_AT = "{prompt}, step {step}"
SHEET = "Sheet"
SHEET_STEPS = "Saves"
SHEET_STRENGTHS = "Strengths, such as 0.6, 0.8, 1"
SHEET_RUNS = "Other runs on the same base"
SHEET_PROMPTS = "Prompts, one a line; empty: those of the run"
SHEET_MAKE = "Make the sheet"
SHEET_MAKING = "the model is loaded …"
NO_SAVES = "No saves yet: sheets and exports are made of those that training writes."
SHEET_NO_STEP = "Choose at least one save."
EXPORT = "Export"
EXPORT_STEP = "Save"
LATEST, BEST_SAVE = "latest", "best by validation"
EXPORT_FORM = "Names of tensors"
AS_CONFIGURED = "as configured"
PUSH, PUSH_TO = "Upload to the hub", "Repository on the hub"
PUSH_HELP = "NAME/REPO, as `hf auth login` knows you"
PUSH_PRIVATE = "Private"
PUSH_WHERE = "Type the repository to upload to: NAME/REPO."
EXPORTING = "exporting …"
VERIFIED = "verified"
DIFFERS = "differs"
