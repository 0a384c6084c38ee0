# shellcheck shell=bash
# The batch script's part of requeueing: requeue a job that ended although no rank decided that it should.
# See docs/requeueing.md. launch/requeue.py copies this text into the batch script after it has set
#   REQUEUE_FOLDER          directory of the job's marker files
#   REQUEUE_MAX_KILLS       requeues in a row, before an attempt could begin, after which the job ends
#   REQUEUE_NOT_RUNNING     Slurm's states of a job that does not run, separated by spaces
#   REQUEUE_TRIES, REQUEUE_PAUSE_S   how often to ask Slurm, and the seconds in between
# After the user's setup the batch script sets REQUEUE_ARMED=yes: an error in the setup ends the job for good.

# Slurm's signals reach the batch script too. It must outlive srun, which must not inherit an ignored signal.
trap : TERM USR1 USR2

# Left behind if an earlier start of this job was killed right after its verdict.
rm -f "$REQUEUE_FOLDER/$SLURM_JOB_ID.verdict"

requeue_unless_decided() {
    local status=$?
    set +eu +o pipefail # whatever the user's setup has set
    if [ "$status" -ne 0 ] && [ "${REQUEUE_ARMED:-}" = yes ] && [ ! -e "$REQUEUE_FOLDER/$SLURM_JOB_ID.verdict" ]; then
        requeue_job "$status"
    else
        rm -f "$REQUEUE_FOLDER/$SLURM_JOB_ID.verdict"
    fi
    exit "$status"
}

# Tries until Slurm answers; does nothing if Slurm itself ended the job (scancel, say) or if it was killed too often.
requeue_job() {
    local status=$1 job=$SLURM_JOB_ID killed=$REQUEUE_FOLDER/$SLURM_JOB_ID.killed counted='' kills try record state
    # The job id of the last task of an array is also that of the array.
    if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
    unset SLURM_TIME_FORMAT
    for ((try = 1; try <= REQUEUE_TRIES; try++)); do
        [ "$try" -eq 1 ] || sleep "$REQUEUE_PAUSE_S"
        record=$(scontrol show job -o "$job") || continue
        record=${record%% Command=*} # users' texts follow
        state=${record##* JobState=}
        case " $REQUEUE_NOT_RUNNING " in *" ${state%% *} "*) return ;; esac
        # Requeued already, and running again elsewhere.
        case $record in *" Restarts=${SLURM_RESTART_COUNT:-0} "*) ;; *) return ;; esac
        # A preemption, before Python could handle its signal, is not the fault of the environment.
        case $record in *" PreemptTime=2"*) counted=yes ;; esac
        if [ -z "$counted" ]; then
            kills=0
            [ ! -e "$killed" ] || kills=$(wc -l <"$killed")
            [ "$kills" -lt "$REQUEUE_MAX_KILLS" ] || return
            echo "status $status" >>"$killed"
            counted=yes
        fi
        echo "[launch] the job ended with status $status and no rank decided that it should: requeueing job $job"
        scontrol requeue incomplete "$job" && return
        scontrol update jobid="$job" requeue=1 # the site's default may be not to requeue
    done
}

trap requeue_unless_decided EXIT
