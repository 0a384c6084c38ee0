# shellcheck shell=bash
# The batch script's part of requeueing: requeue a job that ended without a decision of a rank.
# See docs/slurm.md, "How requeueing decides". launch/requeue.py copies this text into the batch script after it has set
#   REQUEUE_FOLDER              directory of the job's marker files
#   REQUEUE_SUBMISSION          name of the job's submission, part of the path of its batch script
#   REQUEUE_MAX_FAILED_STARTS   failed starts in a row, before an attempt could begin, after which the job ends
#   REQUEUE_GIVEN_UP            prefix for the reason of the last failed start
#   REQUEUE_NOTE_BYTES          size of the line that counts failed starts
#   REQUEUE_NOT_RUNNING         Slurm's states of a job that does not run, separated by spaces
#   REQUEUE_TRIES, REQUEUE_PAUSE_S   how often to ask Slurm, and the pause in seconds
#   REQUEUE_MAX_FORGOTTEN       answers in a row that no such job exists, after which Slurm has lost it
# After the user's setup the batch script calls requeue_arm: an error in the setup ends the job for good.

# Slurm's signals reach the batch script too. It must outlive srun, and srun must not inherit an ignored signal.
trap : HUP USR1 USR2
trap REQUEUE_TERMINATED=yes TERM

# The job id of the last task of an array is also that of the array.
REQUEUE_JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
REQUEUE_JOB=${REQUEUE_JOB:-$SLURM_JOB_ID}
# The job's time is accounted from here on: the boot id of this machine, and the seconds since boot.
read -r REQUEUE_UPTIME _ </proc/uptime
read -r REQUEUE_BOOT </proc/sys/kernel/random/boot_id
export RUNNER_BATCH_BEGAN="$REQUEUE_BOOT $REQUEUE_UPTIME"
REQUEUE_BEGAN=$(TZ=UTC0 date +%Y-%m-%dT%H:%M:%S)

# Exported for the ranks, which otherwise know only the id of the job.
export REQUEUE_SUBMISSION
# A job that Slurm has lost may run at the same time as a later job with its id. And each start has a separate file: a rank
# of an earlier start, on a disconnected node, may write late.
REQUEUE_MARK="$REQUEUE_FOLDER/$REQUEUE_JOB${REQUEUE_SUBMISSION:+.$REQUEUE_SUBMISSION}"
REQUEUE_VERDICT="$REQUEUE_MARK.${SLURM_RESTART_COUNT:-0}.verdict"
# Such a file is left if an earlier start of this job was killed right after its verdict.
rm -f "$REQUEUE_MARK".*.verdict

# Failed starts in a row (empty if the count cannot be read), and why the last one failed. Overwritten in place, which
# works on a full disk.
read_failed_starts() {
    REQUEUE_STARTS=unread REQUEUE_REASON=''
    read -r REQUEUE_STARTS REQUEUE_REASON 2>/dev/null <"$REQUEUE_MARK.starts"
    if [ "$REQUEUE_STARTS" = unread ] && [ -e "$REQUEUE_MARK.starts" ]; then
        REQUEUE_STARTS=''
    else
        case $REQUEUE_STARTS in '' | *[!0-9]*) REQUEUE_STARTS=0 ;; esac
    fi
}
note_failed_starts() (
    umask go-w # only this user may decide whether the job is requeued
    printf "%-${REQUEUE_NOTE_BYTES}.${REQUEUE_NOTE_BYTES}s\n" "$1" 1<>"$REQUEUE_MARK.starts"
) 2>/dev/null
read_failed_starts || :
[ -z "$REQUEUE_STARTS" ] || note_failed_starts "$REQUEUE_STARTS" || :

# A command of the setup that fails ends the job, which would train in a wrong environment. Failures inside a sourced file
# are ignored; only the status of the file counts.
requeue_check_setup() {
    REQUEUE_DEPTH=$((${#BASH_SOURCE[@]} - 1))
    trap 'requeue_setup_failed "$?" "$BASH_COMMAND" "${#BASH_SOURCE[@]}"' ERR
}
requeue_setup_failed() {
    [ "$1" -le 128 ] && [ "$3" -le "$REQUEUE_DEPTH" ] || return 0
    REQUEUE_SETUP_FAILED="launcher.setup failed: $2 ended with status $1"
    echo "[launch] $REQUEUE_SETUP_FAILED: correct it, and rerun the command"
    exit "$1"
}

# After a signal that ends a command of the setup, the script continues, and the ranks react to a preemption. But a setup
# that reaches the time limit would reach it again.
requeue_arm() {
    if is_out_of_time; then exit 1; fi
    REQUEUE_ARMED=yes
}
is_out_of_time() {
    [ -n "${REQUEUE_TERMINATED:-}" ] || return 1
    case $(TZ=UTC0 scontrol show job -o "$REQUEUE_JOB" 2>&1) in *" Reason=TimeLimit "*) ;; *) return 1 ;; esac
}

requeue_unless_decided() {
    local status=$?
    set +eu +o pipefail # the user's setup may have set these
    if [ "$status" -ne 0 ] && [ "${REQUEUE_ARMED:-}" = yes ] && [ ! -e "$REQUEUE_VERDICT" ]; then
        requeue_job "$status"
    elif [ "$status" -ne 0 ] && [ "${REQUEUE_ARMED:-}" != yes ] && is_out_of_time; then
        note_failed_starts "1 ${REQUEUE_GIVEN_UP}launcher.setup reached the time limit: increase launcher.time"
        echo "[launch] launcher.setup reached the time limit: increase launcher.time"
    elif [ -n "${REQUEUE_SETUP_FAILED:-}" ]; then
        note_failed_starts "1 $REQUEUE_GIVEN_UP$REQUEUE_SETUP_FAILED"
    else
        rm -f "$REQUEUE_VERDICT"
        if [ "$status" -ne 0 ] && [ "${REQUEUE_ARMED:-}" = yes ]; then
            note_failed_starts 0 # the job may be restarted when a full disk prevents creating the file
        else
            rm -f "$REQUEUE_MARK.starts"
        fi
    fi
    exit "$status"
}

# Try until Slurm answers. Do nothing if the job was cancelled, is requeued already, or failed too often.
requeue_job() {
    local status=$1 job=$REQUEUE_JOB counted='' asked='' pause_s='' forgotten=0 try record script state only
    unset SLURM_TIME_FORMAT
    trap '' TERM HUP USR1 USR2 # srun is over; the commands that ask Slurm must survive these signals, too
    [ "$status" -ne 75 ] || counted=yes # an attempt was interrupted, and its rank could not ask Slurm: no failed start
    for ((try = 1; try <= REQUEUE_TRIES; try++)); do
        [ -z "$pause_s" ] || sleep "$pause_s"
        pause_s=$REQUEUE_PAUSE_S
        if ! record=$(TZ=UTC0 scontrol show job -o "$job" 2>&1); then
            echo "[launch] Slurm does not report the state of job $job: $record"
            case $record in *'Invalid job id specified'*) forgotten=$((forgotten + 1)) ;; *) forgotten=0 ;; esac
            [ "$forgotten" -lt "$REQUEUE_MAX_FORGOTTEN" ] && continue
            echo "[launch] Slurm has lost job $job: nothing is requeued, rerun the command to continue"
            return
        fi
        forgotten=0
        script=${record#* Command=} record=${record%% Command=*} # the rest is users' texts
        # Requeued already, and perhaps running on other nodes.
        case $record in *" Restarts=${SLURM_RESTART_COUNT:-0} "*) ;; *) return ;; esac
        if is_another_job "$record" "$script"; then
            echo "[launch] the id $job belongs to another job now, and this job is gone: nothing is requeued"
            return
        fi
        state=${record##* JobState=} only=(incomplete)
        case " $REQUEUE_NOT_RUNNING " in *" ${state%% *} "*)
            is_ended_but_not_cancelled "$record" || return
            only=()
            ;;
        *) [ -z "$asked" ] || return ;; # Slurm is about to end it
        esac
        # A preemption before Python could handle its signal is no failed start.
        case $record in *" PreemptTime=2"*) counted=yes ;; esac
        if [ -z "$counted" ]; then
            count_failed_start "$status" || return
            counted=yes
        fi
        echo "[launch] the job ended with status $status and no rank decided that it should: requeueing job $job"
        # The site's default may forbid requeues. Ask again at once: the job may be killed during a pause.
        if scontrol requeue "${only[@]}" "$job" ||
            { scontrol update jobid="$job" requeue=1 && scontrol requeue "${only[@]}" "$job"; }; then
            [ ${#only[@]} -gt 0 ] || return
            # Slurm reports success but does nothing if the job has ended since its state was read.
            asked=yes pause_s=''
        fi
    done
}

# Whether the id belongs to a later job, because Slurm has lost this one. The path of the batch script identifies the job.
# Where sbatch is a wrapper that submits a copy, its user, name and time do. launch/requeue.py has the same check.
is_another_job() {
    local submitted=${1##* SubmitTime=}
    case $2 in
    *.submission_file_"${REQUEUE_SUBMISSION:-?}"-*) return 1 ;;
    *.submission_file_*) [ -z "$REQUEUE_SUBMISSION" ] || return 0 ;;
    esac
    case $1 in *" UserId="*) ;; *) return 1 ;; esac
    case $1 in *" UserId="*"(${SLURM_JOB_UID:-$UID}) "*) ;; *) return 0 ;; esac
    case $1 in *" JobName=${SLURM_JOB_NAME:-} UserId="*) return 1 ;; esac
    [[ ${submitted%% *} > $REQUEUE_BEGAN ]]
}

# Whether Slurm has ended the job, for its time limit or to make room, perhaps before Python could handle signals.
# launch/requeue.py has the same check.
is_ended_but_not_cancelled() {
    local reason=${1##* Reason=} preempted=${1##* PreemptTime=} ended=${1##* EndTime=}
    [ "${reason%% *}" != TimeLimit ] || return 0
    case $1 in *" PreemptTime=2"*) [ "${preempted%% *}" = "${ended%% *}" ] ;; *) return 1 ;; esac
}

# Whether the job may be requeued once more. (In a trap, a bare `return` returns the status from before the trap.)
count_failed_start() {
    local restarts=${SLURM_RESTART_COUNT:-0} budget="$REQUEUE_MAX_FAILED_STARTS starts failed in a row"
    read_failed_starts
    REQUEUE_REASON=${REQUEUE_REASON:-it ended with status $1, see its log}
    if [ "${REQUEUE_STARTS:-0}" -lt "$REQUEUE_MAX_FAILED_STARTS" ]; then
        [ -n "$REQUEUE_STARTS" ] && note_failed_starts "$((REQUEUE_STARTS + 1)) $REQUEUE_REASON" && return 0
        # If the count cannot be read or written, Slurm's count of all restarts is the budget.
        [ "$restarts" -lt "$REQUEUE_MAX_FAILED_STARTS" ] && return 0
        budget="it cannot be recorded how many starts failed, and after $restarts restarts this one did"
    fi
    [ -z "$REQUEUE_STARTS" ] || note_failed_starts "$REQUEUE_STARTS $REQUEUE_GIVEN_UP$REQUEUE_REASON"
    echo "[launch] ${REQUEUE_GIVEN_UP}$budget before an attempt could begin"
    return 1
}

trap requeue_unless_decided EXIT
