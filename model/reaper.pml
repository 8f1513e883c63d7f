/* The reaper, who restarts workers, and what nobody decides. Part of wake.pml. */

/* ---- restarts ---------------------------------------------------------------------------------------------------- */

/* Python: restart (pool/restarts.py), revive (backends/process.py). C++: declare_dead (reaper.cpp), watch (reaper.cpp) */
inline replace(w_) {
#ifndef NO_DECLARE
	LOCK;
	if
	:: is_watched[w_] -> bury(w_)
	:: else
	fi;
	UNLOCK;
#endif
	atomic { gone[w_] = false; respawn[w_] = true; hung[w_] = false; sigkill[w_] = false };
	LOCK;
	atomic { is_watched[w_] = true; generation[w_]++ };
#ifndef KEEP_DEAD
	dead[w_] = NONE;
#endif
	UNLOCK
}

#if REVIVES
/* Python: _run (pool/restarts.py) */
active proctype Restarter() {
	byte me = RESTARTER;
	byte w, t, old, num_settled, death;
	bool is_gone;

end_waiting:
	do
	:: atomic { order != NOBODY -> w = order; order = NOBODY; KILL(w) };
		ended[w];
		if
		:: replace(w)
		:: true  /* it does not come up */
		fi;
		is_restarting[w] = false;
#ifndef NO_LAST_CHECK
		check_deaths_of(w);
#endif
		w = 0
	od;
died:
	skip
}
#endif

/* ---- the reaper -------------------------------------------------------------------------------------------------- */

/* C++: give_up (reaper.cpp) */
#ifdef NO_GIVE_UP_COMPARE
#define IS_STILL(r_, word_) true
#else
#define IS_STILL(r_, word_) (state[r_] == word_)
#endif
#ifdef BLAME_TICKET
#define IS_LATE_COMMAND is_asked
#define SUSPECT (STATE_TICKET(s) == c -> STATE(c, RUNNING) : s)
#else
#define IS_LATE_COMMAND (is_early -> is_asked && STATE_TICKET(s) < c : s == STATE(c, RUNNING))
#define SUSPECT s
#endif
#define IS_JUST(r_) assert(began_at[r_] == looked || early_at[w] == looked)
inline give_up(r_) {
	STEP(is_asked = (done[r_] != c));
	if
	:: atomic { IS_LATE_COMMAND && IS_STILL(r_, SUSPECT) -> state[r_] = STATE(c, CONDEMNED); IS_JUST(r_) }
	:: atomic { IS_LATE_COMMAND && !IS_STILL(r_, SUSPECT) -> is_hit = false }
#ifdef BLAME_TICKET
	:: atomic { !IS_LATE_COMMAND -> IS_JUST(r_) }
#else
	:: atomic { !IS_LATE_COMMAND && is_early && !is_asked -> IS_JUST(r_) }
	:: atomic { !IS_LATE_COMMAND && (!is_early || is_asked) -> is_hit = false }
#endif
	fi;
	if
	:: is_hit ->
#ifndef LATE_OVERDUE
		STEP(dead[w] = OVERDUE);
#endif
		if
		:: IS_LATE_COMMAND -> settle(r_, c, OVERDUE)
		:: else
		fi;
#ifdef LATE_OVERDUE
		STEP(dead[w] = OVERDUE);
#endif
#ifndef NO_SETTLED_COUNT
		if
		:: IS_LATE_COMMAND -> count_results(1)
		:: else
		fi;
#endif
		STEP(sigkill[w] = true);
		condemn_worker(w, NEIGHBOUR)
	:: else
	fi
}

/* C++: check_deadline (reaper.cpp), check_current (reaper.cpp). Two looks; the clock says that a limit lies between them.
 * The command that hangs is the one that the state names, if there is no progress after it was read.
 */
inline check_deadlines() {
	LOCK;
	STEP(looked = progress[w]);
	UNLOCK;
	LOCK;
	STEP(is_hit = is_watched[w] && progress[w] == looked);
	if
	:: is_hit -> STEP(l = current[w]; is_hit = (l != NO_SERVER && dead[w] == NONE))
	:: else
	fi;
	if
	:: is_hit ->
#if OVERLAP
		STEP(is_early = (running[w] == EARLY));
#endif
		STEP(c = ticket[ROW(w, l)]);
		STEP(s = state[ROW(w, l)]);
#ifndef NO_SECOND_PROGRESS
		STEP(is_hit = (progress[w] == looked))
#endif
	:: else
	fi;
	if
	:: is_hit -> give_up(ROW(w, l))
	:: else
	fi;
	atomic { looked = 0; l = 0; c = 0; s = 0; is_hit = false; is_early = false; is_asked = false; UNLOCK }
}

/* C++: loop (reaper.cpp), on_event (reaper.cpp) */
active proctype Reaper() {
	byte me = REAPER, limits = LIMITS;
	byte w, l, t, c, s, old, num_settled, death, looked, event_generation;
	bool is_gone, is_hit, is_early, is_asked;

end_watching:
	do
	:: atomic { is_watched[0] && gone[0] -> w = 0; event_generation = generation[0]; goto on_event }
#if W > 1
	:: atomic { is_watched[1] && gone[1] -> w = 1; event_generation = generation[1]; goto on_event }
#endif
#if LIMITS
	:: atomic { limits -> limits = 0 }
	:: atomic { limits -> limits--; goto on_tick }
	:: atomic { !limits && hung[0] && !dead[0] && is_watched[0] && !gone[0] -> goto on_tick }
#endif
	:: false ->
on_event:
		LOCK;
		if
#ifdef NO_GENERATION
		:: is_watched[w] -> bury(w)
#else
		:: is_watched[w] && event_generation == generation[w] -> bury(w)
#endif
		:: else
		fi;
		atomic { UNLOCK; w = 0; event_generation = 0 }
#if LIMITS
	:: false ->
on_tick:
		check_deadlines()
#endif
	od;
died:
	skip
}

/* ---- what nobody decides ----------------------------------------------------------------------------------------- */

#if CLOSERS
#define MAY_DIE(w_) (!gone[w_] && !exited[w_] && !ended[w_])
#else
#define MAY_DIE(w_) (!is_closed && !gone[w_] && !exited[w_] && !ended[w_])
#endif

active proctype Environment() {
	byte kills = KILLS;

end_of_events:
	do
	:: false
#ifdef TSO
	:: atomic { unseen[0] -> DRAIN(0) }
#if W > 1
	:: atomic { unseen[ROW(1, 0)] -> DRAIN(1) }
#endif
#endif
	/* What may happen need not: who waits for ever is not excused by a death that could still wake him. */
#if SPURIOUS
	:: atomic { spurious -> spurious = 0 }
#endif
#if KILLS
	:: atomic { kills -> kills = 0 }
	:: atomic { kills && MAY_DIE(0) -> kills--; KILL(0) }
#if W > 1
	:: atomic { kills && MAY_DIE(1) -> kills--; KILL(1) }
#endif
#endif
#if LIMITS && MORTAL
	:: atomic { sigkill[0] && MAY_DIE(0) -> KILL(0) }
#endif
	od
}
