/* The reaper, the thread of a restart, and events that no thread controls. Part of wake.pml. */

/* ---- restarts ---------------------------------------------------------------------------------------------------- */

/* C++: rewrite_control_words (command_writer.cpp). One step: the GIL excludes the learner, and the worker that could write there is dead.
 * Commands given before its restart began are lost; commands given since then belong to its successor.
 */
inline rewrite_row(r_) {
	if
	:: done[r_] != PUBLISHED(r_) && IS_LOST(r_) -> WRITE_FAULT(r_, PUBLISHED(r_), DIED); done[r_] = PUBLISHED(r_)
	:: done[r_] != PUBLISHED(r_) && !IS_LOST(r_) -> done[r_] = PUBLISHED(r_) - 1
	:: else
	fi;
	ticket[r_] = (IS_HELD((r_) / R) -> done[r_] : PUBLISHED(r_));
	state[r_] = STATE(done[r_], 0);
	SET_SCRIBBLED(r_, false)
}

#if SPARES
#define NOTE_REBUILT(r_) NOTE_REBUILT_SERVER(r_)
#else
#define NOTE_REBUILT(r_) skip
#endif
inline rewrite_control_words(w_) {
	atomic {
		FOR_ROWS(w_, NOTE_REBUILT);
		SET_RELEASED(w_, true);
		requests[w_] = num_posted[w_]; stop[w_] = is_closed; worker_parked[w_] = false; current[w_] = NO_SERVER;
		FOR_ROWS(w_, rewrite_row)
	};
	ring_pool()
}

#if REVIVES
/* Python: run (pool/workers.py), revive (backends/process.py). C++: clear_dead_worker (recovery.cpp), declare_dead (reaper.cpp),
 * notify (replay.cpp). It may fail early (no thread, or the process does not end) or late (the envs cannot be built).
 */
#define START(w_) gone[w_] = false; frozen[w_] = false; hung[w_] = false; sigkill[w_] = false; respawn[w_] = true
active proctype Restarter() {
	byte me = RESTARTER, late_fails = LATE_FAILS;
	byte w, t, old, num_aborted, death;
	bool is_gone, is_good;

end_waiting:
	do
	:: atomic { order != NOBODY -> w = order; order = NOBODY; KILL(w) };
		ended[w];
#if !SPARES && !CALM
		if
		:: goto end_of_task
		:: true
		fi;
#endif
#ifndef NO_DECLARE
		LOCK;
		if
		:: is_watched[w] -> mark_dead(w)
		:: else
		fi;
		UNLOCK;
#endif
		rewrite_control_words(w);
		if
		:: atomic { START(w); is_good = true }
#if !SPARES && !CALM
		:: true
#endif
#if LATE_FAILS
		:: atomic { late_fails -> late_fails--; START(w) };
			atomic { KILL(w) };
			ended[w]
#endif
		fi;
end_of_task:
#ifdef EARLY_NOTIFY
		STEP(is_notified = true);
		ring_pool();
#endif
		STEP(is_task_good[w] = is_good; is_task_done[w] = true; is_good = false);
#ifdef EARLY_NOTIFY_RING
		ring_pool();
		STEP(is_notified = true);
#elif !defined(EARLY_NOTIFY)
		STEP(is_notified = true);
#ifndef NO_NOTIFY_RING
		ring_pool();
#endif
#endif
		w = 0
	od;
died:
	skip
}
#endif

/* ---- the reaper -------------------------------------------------------------------------------------------------- */

/* Two looks of the reaper with a limit between them. The command that the state names hangs if there is no progress
 * after the state was read. The verdict is right if that command ran, or waited, through both looks.
 */
#ifdef NO_GIVE_UP_COMPARE
#define IS_STILL_AT(r_, word_) true
#elif defined(BLAME_TICKET)
#define IS_STILL_AT(r_, word_) (state[r_] == (STATE_TICKET(word_) == c -> STATE(c, RUNNING) : word_))
#else
#define IS_STILL_AT(r_, word_) (state[r_] == word_)
#endif
#ifdef BLAME_TICKET
#define IS_LATE_COMMAND is_asked
#else
#define IS_LATE_COMMAND (is_early -> is_asked && STATE_TICKET(s) + 1 == c : s == STATE(c, RUNNING))
#endif
#define IS_JUST(r_) assert(began_at[r_] == looked || early_at[w] == looked || (is_untaken && was_waiting))

/* C++: has_stalled (reaper.cpp) */
#ifdef NO_SECOND_PROGRESS
#define IS_STILL true
#else
#define IS_STILL (progress[w] == looked)
#endif

/* C++: end_overdue (reaper.cpp), kill (reaper.cpp) */
inline end_overdue() {
	STEP(dead[w] = OVERDUE);
	STEP(sigkill[w] = true);
	abort_commands(w, NEIGHBOUR);
	/* A process is killed, so no bell matters. */
#if THREADS && !defined(NO_OVERDUE_RING)
	ring_worker(w)
#endif
}

/* C++: abandon (reaper.cpp) */
inline give_up(r_, late_) {
	if
	:: atomic { IS_STILL_AT(r_, late_) -> state[r_] = STATE(c, ABORTED); IS_JUST(r_) };
#ifndef LATE_OVERDUE
		STEP(dead[w] = OVERDUE);
#endif
		write_fault(r_, c, OVERDUE);
#ifndef NO_ABORTED_COUNT
		count_results(1);
#endif
		end_overdue()
	:: atomic { !IS_STILL_AT(r_, late_) }
	fi
}

/* C++: check_current (reaper.cpp) */
#if STOPS
#define BLAME_STUCK(r_) if :: is_hit && !is_early && s == STATE(c, PUBLISHING) -> IS_JUST(r_) :: else fi
#else
#define BLAME_STUCK(r_) skip
#endif
inline check_current(r_) {
#if OVERLAP
	STEP(is_early = (running[w] == EARLY));
#endif
	STEP(c = ticket[r_]);
	STEP(s = state[r_]);
	STEP(is_hit = IS_STILL; BLAME_STUCK(r_));
	if
	:: is_hit -> STEP(is_asked = (done[r_] != c))
	:: else
	fi;
	if
	:: is_hit && IS_LATE_COMMAND -> give_up(r_, s)
	:: is_hit && is_early && !is_asked -> IS_JUST(r_); end_overdue()
#if STOPS && !defined(NO_STUCK)
	/* C++: end_stuck (reaper.cpp). The publishing never ends: the command is aborted when the worker is dead. */
	:: is_hit && !IS_LATE_COMMAND && !(is_early && !is_asked) -> stuck[w] = l; end_overdue()
#endif
	:: else
	fi
}

/* C++: check_untaken (reaper.cpp) */
#define IS_WAITING(r_) (ticket[r_] != done[r_])
#if R > 1
#define IS_ANY_WAITING(w_) (IS_WAITING(ROW(w_, 0)) || IS_WAITING(ROW(w_, 1)))
#else
#define IS_ANY_WAITING(w_) IS_WAITING(ROW(w_, 0))
#endif
#ifdef TAKEN_ONLY
#define IS_UNTAKEN (STATE_TICKET(s) + 1 == c)
#else
#define IS_UNTAKEN (STATE_TICKET(s) + 1 == c || s == STATE(c, RUNNING))
#endif
inline check_untaken() {
	l = 0;
	STEP(is_hit = IS_WAITING(ROW(w, 0)));
#if R > 1
	if
	:: !is_hit -> l = 1; STEP(is_hit = IS_WAITING(ROW(w, 1)))
	:: else
	fi;
#endif
#ifndef NO_FIRST_LOOK
	is_hit = is_hit && was_waiting;
#endif
	if
	:: is_hit ->
		STEP(c = ticket[ROW(w, l)]);
		STEP(s = state[ROW(w, l)]);
		STEP(is_hit = IS_STILL);
		is_untaken = true
	:: else
	fi;
	if
	:: is_hit && IS_UNTAKEN -> give_up(ROW(w, l), s)
	:: else
	fi
}

/* C++: is_finished (reaper.cpp) */
inline look_whether_finished(r_) {
#if OVERLAP
	STEP(is_early = (running[w] == EARLY));
#endif
	if
	:: !is_early -> STEP(s = state[r_]); STEP(is_untaken = (done[r_] == STATE_TICKET(s)))
	:: else
	fi
}

/* C++: check_deadline (reaper.cpp), loop (reaper.cpp). The first look stores what the second compares. */
inline check_deadlines() {
	LOCK;
	STEP(looked = progress[w]; was_waiting = IS_ANY_WAITING(w));
	UNLOCK;
	LOCK;
	STEP(is_hit = is_watched[w] && progress[w] == looked);
	if
	:: is_hit -> STEP(l = current[w]; is_hit = (dead[w] == NONE))
	:: else
	fi;
	if
	:: is_hit && l != NO_SERVER -> look_whether_finished(ROW(w, l))
	:: is_hit && l == NO_SERVER -> is_untaken = true
	:: else
	fi;
	if
#ifndef NO_UNTAKEN
	:: is_hit && is_untaken -> is_untaken = false; check_untaken()
#endif
	:: is_hit && !is_untaken -> check_current(ROW(w, l))
	:: else
	fi;
	atomic {
		looked = 0; l = 0; c = 0; s = 0; is_hit = false; is_early = false; is_asked = false; is_untaken = false; was_waiting = false;
		UNLOCK
	}
}

#if LANES
/* C++: end_overdue (reaper.cpp), for the other lanes of a worker. The worker of the model is one of them: it may be given up at any point. */
inline end_with_lane() {
	LOCK;
	if
	:: is_watched[w] && dead[w] == NONE -> end_overdue()
	:: else
	fi;
	UNLOCK
}
#endif

/* The reaper looks at a stuck worker once more. A stopped worker is given up after at most two more looks. */
#if STOPS
#define IS_STUCK (frozen[0] && IS_ANY_WAITING(0) && looks < 2)
#define COUNT_LOOK looks++
#else
#define IS_STUCK hung[0]
#define COUNT_LOOK skip
#endif

/* C++: loop (reaper.cpp), on_event (reaper.cpp) */
active proctype Reaper() {
	byte me = REAPER, limits = LIMITS, looks;
	byte w, l, t, c, s, old, num_aborted, death, looked, event_generation;
	bool is_gone, is_hit, is_early, is_asked, is_untaken, was_waiting;

end_watching:
	do
	:: atomic { is_watched[0] && gone[0] -> w = 0; event_generation = generation[0]; goto on_event }
#if W > 1
	:: atomic { is_watched[1] && gone[1] -> w = 1; event_generation = generation[1]; goto on_event }
#endif
#if LIMITS
	:: atomic { limits -> limits = 0 }
	:: atomic { limits -> limits--; goto on_tick }
	:: atomic { !limits && IS_STUCK && !dead[0] && is_watched[0] && !gone[0] -> COUNT_LOOK; goto on_tick }
#endif
	:: false ->
on_event:
		LOCK;
		if
#ifdef NO_GENERATION
		:: is_watched[w] -> mark_dead(w)
#else
		:: is_watched[w] && event_generation == generation[w] -> mark_dead(w)
#endif
		:: else
		fi;
		atomic { UNLOCK; w = 0; event_generation = 0 }
#if LIMITS
	:: false ->
on_tick:
#if LANES
		if
		:: check_deadlines()
		:: end_with_lane()
		fi
#else
		check_deadlines()
#endif
#endif
	od;
died:
	skip
}

/* ---- what nobody decides ----------------------------------------------------------------------------------------- */

/* What a dying worker may leave in its words. */
#if SCRIBBLES
#define WILD 7
inline scribble_row(r_) {
	if
	:: true
	:: ticket[r_] = done[r_]
	:: ticket[r_] = WILD
	fi;
	if
	:: true
	:: state[r_] = STATE(newest_ticket[r_], ABORTED)
	:: state[r_] = STATE(newest_ticket[r_], PUBLISHING)
	:: state[r_] = STATE(WILD, RUNNING)
	fi;
	if
	:: true
	:: done[r_] = newest_ticket[r_]
	:: done[r_] = WILD
	fi;
	scribbled[r_] = true
}
#define SCRIBBLE if :: scribbles -> scribbles--; scribble_row(R - 1) :: true fi
#else
#define SCRIBBLE skip
#endif

#if CLOSERS
#define MAY_DIE(w_) (!gone[w_] && !exited[w_] && !ended[w_])
#else
#define MAY_DIE(w_) (!is_closed && !gone[w_] && !exited[w_] && !ended[w_])
#endif

active proctype Environment() {
	byte kills = KILLS, stops = STOPS, scribbles = SCRIBBLES, early_slices = EARLY_SLICES;

end_of_events:
	do
	:: false
#ifdef TSO
	:: atomic { unseen[0] -> DRAIN(0) }
#if W > 1
	:: atomic { unseen[ROW(1, 0)] -> DRAIN(1) }
#endif
#endif
	/* Events that may happen need not: a thread that waits without limit is an error even if a death could still wake it. */
#if SPURIOUS
	:: atomic { spurious -> spurious = 0 }
#endif
#if KILLS
	:: atomic { kills -> kills = 0 }
#if CALM
	/* It is marked dead at once: other bounds cover what happens in between. */
	:: atomic { kills == KILLS && MAY_DIE(0) && worker_asleep[0] && !worker_bell[0] && done[0] > 0 && ticket[0] == done[0] && !mutex ->
			kills--; KILL(0); is_watched[0] = false; worker_parked[0] = false; dead[0] = DIED; bell = true; asleep = false
		}
#endif
	:: atomic { kills && MAY_DIE(0) && (!CALM || kills < KILLS) -> kills--; SCRIBBLE; KILL(0) }
#if W > 1
	:: atomic { kills && MAY_DIE(1) -> kills--; KILL(1) }
#endif
#endif
#if STOPS
	:: atomic { stops -> stops = 0 }
	:: atomic { stops && MAY_DIE(0) -> stops--; frozen[0] = true }
#endif
#if SLICES
	:: atomic { timeout && slices && asleep -> slices--; asleep = false }
#if EARLY_SLICES
	:: atomic { early_slices -> early_slices = 0 }
	:: atomic { early_slices && asleep -> early_slices--; asleep = false }
#endif
#endif
#if LIMITS && MORTAL
	:: atomic { sigkill[0] && MAY_DIE(0) -> KILL(0) }
#endif
	od
}
