/* Restarts, as the learner sees them: commands given meanwhile, and how a restart ends. Part of wake.pml.
 *
 *   learner: begin_restart ── order ──► task: end, clear_dead_worker, start ── notify ──► learner: finish_restart,
 *                                                                                   another task, or cancel_restart
 */

/* C++: check_deaths_of (command_writer.cpp) */
inline check_deaths_of(w_) {
	if
	:: is_restarting[w_] || !dead[w_]
	:: !is_restarting[w_] && dead[w_] -> abort_commands(w_, DIED)
	fi
}

/* Commands given during a restart get their tickets at its end: the predecessor may live, and the successor may fail. */
#ifdef EARLY_RELEASE
bool is_released[W];
#define IS_HELD(w_) (is_restarting[w_] && !is_released[w_])
#define SET_RELEASED(w_, is_) is_released[w_] = is_
#else
#define IS_HELD(w_) is_restarting[w_]
#define SET_RELEASED(w_, is_) skip
#endif

/* C++: dispatch (send.cpp), issue (recovery.cpp): CommandWriter::publish. The predecessor must not see commands for its successor. */
#if !REVIVES
#define PUBLISH(r_) ticket[r_] = PUBLISHED(r_)
#elif defined(NO_HOLD)
#define PUBLISH(r_) ADDRESS(r_); ticket[r_] = PUBLISHED(r_)
#else
#define PUBLISH(r_) ADDRESS(r_); if :: IS_HELD((r_) / R) :: else -> ticket[r_] = PUBLISHED(r_) fi
#endif

#if R > 2
#define FOR_ROWS(w_, do_) do_(ROW(w_, 0)); do_(ROW(w_, 1)); do_(ROW(w_, 2))
#elif R > 1
#define FOR_ROWS(w_, do_) do_(ROW(w_, 0)); do_(ROW(w_, 1))
#else
#define FOR_ROWS(w_, do_) do_(ROW(w_, 0))
#endif

#if REVIVES

/* C++: begin_restart (recovery.cpp). Python: plan_restart (pool/workers.py). Part of an atomic step. */
#define BEGIN_RESTART(w_) \
	is_restarting[w_] = true; SET_RELEASED(w_, false); order = w_; FOR_ROWS(w_, NOTE_MORTAL); RENEW(w_)

/* C++: end_restart (command_writer.cpp) */
#ifdef NO_UNHIDE
#define UNHIDE(r_) skip
#else
#define UNHIDE(r_) ticket[r_] = PUBLISHED(r_)
#endif
inline end_restart(w_) {
	if
	:: is_restarting[w_] ->
		atomic { is_restarting[w_] = false; FOR_ROWS(w_, UNHIDE) };
#ifndef NO_END_RING
		ring_worker(w_)
#endif
	:: else
	fi
}

/* C++: finish_restart (recovery.cpp), watch (reaper.cpp). Python: serve (pool/workers.py). The successor may have died already. */
inline finish_restart(w_) {
	LOCK;
	atomic { is_watched[w_] = true; generation[w_]++; stuck[w_] = NO_SERVER };
#ifndef KEEP_DEAD
#if SCRIBBLES
	reaped[w_] = false;
#endif
	dead[w_] = NONE;
#endif
	UNLOCK;
#if TRUNCATES
	atomic { FOR_ROWS(w_, mark_lost_late) };
#endif
	end_restart(w_);
#ifndef NO_FINISH_CHECK
	check_deaths_of(w_)
#endif
}

/* C++: cancel_restart (recovery.cpp). RELEASE_ALL: the suspended envs. */
#if !REPLAYS || defined(NO_CANCEL_RELEASE)
#define RELEASE_ALL(w_) skip
#else
#define RELEASE_ALL(w_) FOR_ROWS(w_, resume_with_fault)
#endif
inline cancel_restart(w_) {
	end_restart(w_);
	atomic { RELEASE_ALL(w_) };
#ifndef NO_LAST_CHECK
	check_deaths_of(w_)
#endif
}

/* Python: finish_restarts (pool/workers.py), _retry (pool/workers.py), _finish_restarts (pool/recovery.py). Calls come first. */
#if REPLAYS
#ifdef LATE_CALLS
#define SERVE(w_) finish_restart(w_); atomic { has_calls[w_] = true; is_restarted = true }
#else
#define SERVE(w_) has_calls[w_] = true; finish_restart(w_); is_restarted = true
#endif
#else
#define SERVE(w_) finish_restart(w_)
#endif
inline finish_restarts(w_) {
	if
	:: is_restarting[w_] && is_task_done[w_] ->
		is_task_done[w_] = false;
		if
		:: is_task_good[w_] -> SERVE(w_)
		:: !is_task_good[w_] && retries -> atomic { retries--; order = w_ }
		:: !is_task_good[w_] && !retries -> cancel_restart(w_)
		fi
	:: else
	fi
}

/* C++: drain (recovery.cpp). Python: handle (pool/recovery.py) */
inline handle_restarts() {
#ifndef LATE_TAKE
	is_notified = false;
#endif
	finish_restarts(0);
#ifdef LATE_TAKE
	is_notified = false
#endif
}

#endif
