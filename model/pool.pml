/* The learner, the reaper, and what nobody decides. Part of wake.pml. */

/* ---- the learner ------------------------------------------------------------------------------------------------- */

#define IDLE 0
#define PENDING 1
#define FAULTED 2

inline ring_touched(w_) {
#ifndef NO_RING
	if
	:: is_touched[w_] -> ring_worker(w_)
	:: else
	fi
#else
	skip
#endif
}

inline ring_all_touched() {
	ring_touched(0);
#if W > 1
	ring_touched(1)
#endif
}

inline check_death(w_) {
#ifndef NO_CHECK_DEATHS
	if
	:: is_touched[w_] ->
		if
		:: dead[w_] -> condemn_worker(w_, DIED)
		:: !dead[w_]
		fi
	:: else
	fi
#else
	skip
#endif
}

/* C++: check_deaths (ledger.cpp) */
inline check_deaths() {
#if KILLS || LIMITS
	check_death(0);
#if W > 1
	check_death(1)
#endif
#else
	skip
#endif
}

#define PLAN(r_) if :: status[r_] == IDLE && books[r_] < T -> is_touched[(r_) / R] = true :: else fi
#define PLAN_ALL PLAN(0); if :: NR > 1 -> PLAN(1 % NR) :: else fi; if :: NR > 2 -> PLAN(2 % NR); PLAN(3 % NR) :: else fi

inline write_ticket(r_) {
	if
	:: atomic { status[r_] == IDLE && books[r_] < T -> status[r_] = PENDING; num_pending++; books[r_]++; ticket[r_] = books[r_] }
	:: else
	fi
}

/* C++: dispatch (ledger.cpp). Commands all rows that are idle. */
inline dispatch() {
	atomic { PLAN_ALL };
#ifdef EARLY_RING
	ring_all_touched();
#endif
#ifdef EARLY_CHECK_DEATHS
	check_deaths();
#endif
	write_ticket(0);
#if NR > 1
	write_ticket(1);
#endif
#if NR > 2
	write_ticket(2);
	write_ticket(3);
#endif
#ifndef EARLY_RING
	ring_all_touched();
#endif
#ifndef EARLY_CHECK_DEATHS
	check_deaths();
#endif
	is_touched[0] = false;
#if W > 1
	is_touched[1] = false
#endif
}

inline scan_row(r_) {
	if
	:: status[r_] == PENDING && ready < need ->
		if
		:: atomic { done[r_] == books[r_] -> ready++; is_fault = is_fault || fault[r_] }
		:: done[r_] != books[r_]
		fi
	:: else
	fi
}

/* C++: scan (wait.cpp) */
inline scan() {
	ready = 0;
	scan_row(0);
#if NR > 1
	scan_row(1);
#endif
#if NR > 2
	scan_row(2);
	scan_row(3);
#endif
}

/* C++: rest (wait.cpp) */
inline rest() {
#if SPINNERS
	spin_for(PARENT_SEAT, bell);
#endif
	if
	:: !is_rung -> park(bell, parked, asleep)
	:: else
	fi;
	is_rung = false
}

/* C++: wait_ids (wait.cpp) */
inline wait_ids() {
	do
	::
#ifndef LATE_BELL
		bell = false;
#endif
#ifndef LATE_COUNT
		counted = count;
#endif
#ifdef TRUST_COUNT
		if
		:: wanted && counted < wanted
		:: else -> scan()
		fi;
#else
		scan();
#endif
#ifdef LATE_COUNT
		counted = count;
#endif
		if
		:: is_fault || ready >= need -> break
		:: else
		fi;
#if CLOSERS
		if
		:: is_closed -> break
		:: !is_closed
		fi;
#endif
#ifdef KEEP_WANT
		if
		:: !wanted -> atomic { wanted = counted + need - ready; want = wanted }
		:: else
		fi;
#elif !defined(LATE_WANT)
		atomic { wanted = counted + need - ready; want = wanted };
#endif
		if
#ifndef NO_RECOUNT
		:: count != counted
		:: count == counted ->
#else
		:: true ->
#endif
#ifdef LATE_WANT
			want = counted + need - ready;
#endif
#ifdef LATE_BELL
			bell = false;
#endif
			rest()
		fi
	od;
	atomic { counted = 0; wanted = 0; need = 0; ready = 0; is_fault = false }
}

/* Only differences of count matter. Counting on from the lowest that is in use keeps the states few. */
inline rebase() {
	r = count;
	do
	:: v < W + 2 -> r = (before[v] < r -> before[v] : r); v++
	:: else -> v = 0; break
	od;
	count = count - r;
	want = (want > r -> want - r : 0);
	do
	:: v < W + 2 -> before[v] = (before[v] == 255 -> 255 : before[v] - r); v++
	:: else -> v = 0; r = 0; break
	od
}

/* The ghosts of a row whose result was received: nobody may write it any more. What is not read again is forgotten. */
#define RECEIVE(r_) honest[r_] = books[r_]; settled[r_] = books[r_]; data[r_] = 0; fault[r_] = NONE; num_pending--

/* C++: settle (gather.cpp), take_faults (gather.cpp). What is there is received, once and as it was published. */
inline collect() {
	do
	:: atomic {
			r < NR ->
			if
			:: status[r] == PENDING && done[r] == books[r] && fault[r] == NONE ->
				assert(data[r] == books[r] && honest[r] == books[r] && settled[r] < books[r]);
				status[r] = IDLE;
				RECEIVE(r)
			:: status[r] == PENDING && done[r] == books[r] && fault[r] != NONE ->
				assert(settled[r] == books[r] && honest[r] < books[r]);
				status[r] = FAULTED;
				RECEIVE(r)
			:: else
			fi;
			r++
		}
	:: atomic { r == NR -> rebase(); break }
	od
}

/* C++: post_request (ledger.cpp) */
inline post_request(r_) {
	STEP(request_row[(r_) / R] = r_; request_after[(r_) / R] = books[r_]; num_posted[(r_) / R]++);
#ifdef EARLY_REQUEST_RING
	ring_worker((r_) / R);
	STEP(requests[(r_) / R]++)
#else
	STEP(requests[(r_) / R]++);
#ifndef NO_REQUEST_RING
	ring_worker((r_) / R)
#endif
#endif
}

/* All threads of a process are gone; what it stored has arrived. */
#define KILL(w_) DRAIN(w_); gone[w_] = true

/* Python: revive (backends/process.py). C++: declare_dead (reaper.cpp), watch (reaper.cpp) */
inline revive(w_) {
	atomic { KILL(w_) };
	ended[w_];
#ifndef NO_DECLARE
	LOCK;
	if
	:: is_watched[w_] -> bury(w_)
	:: else
	fi;
	UNLOCK;
#endif
	atomic { gone[w_] = false; respawn[w_] = true; hung[w_] = false; sigkill[w_] = false; replies[w_] = num_posted[w_] };
	LOCK;
	atomic { is_watched[w_] = true; generation[w_]++ };
#ifndef KEEP_DEAD
	dead[w_] = NONE;
#endif
	UNLOCK
}

/* Faulted rows of the living are reset; a dead worker is replaced if it may be, and is left alone otherwise. */
inline mend() {
#if KILLS || LIMITS
	do
	:: r < NR ->
		if
		:: status[r] == FAULTED ->
			if
			:: !dead[r / R] -> status[r] = IDLE
#if REVIVES
			:: dead[r / R] && revives -> revives--; revive(r / R); status[r] = (dead[r / R] -> FAULTED : IDLE)
			:: dead[r / R] && !revives
#else
			:: dead[r / R]
#endif
			fi
		:: else
		fi;
		r++
	:: else -> r = 0; break
	od
#else
	skip
#endif
}

/* C++: close (ledger.cpp) */
inline close(i_) {
#ifdef EARLY_CLOSE_RING
	ring_pool();
#endif
	STEP(is_closed = true);
	do
	:: i_ < W ->
#ifdef EARLY_STOP_RING
		ring_worker(i_);
		STEP(stop[i_] = true);
#else
		STEP(stop[i_] = true);
#ifndef NO_STOP_RING
		ring_worker(i_);
#endif
#endif
		i_++
	:: else -> i_ = 0; break
	od;
#if !defined(NO_CLOSE_RING) && !defined(EARLY_CLOSE_RING)
	ring_pool()
#endif
}

/* Every request is answered, or its worker is dead; every worker ends, and the dead are buried. */
inline finish() {
#if REQUESTS
	is_closed || gone[0] || hung[0] || replies[0] == num_posted[0];
#endif
#if ENDS
	close(v);
	exited[0] || (ended[0] && !is_watched[0]);
#if W > 1
	exited[1] || (ended[1] && !is_watched[1]);
#endif
	atomic { !mutex -> assert(spinners == 0) }
#else
	skip
#endif
}

#if REQUESTS
#define MAYBE_REQUEST if :: posts -> posts--; post_request(0) :: true fi
#else
#define MAYBE_REQUEST skip
#endif

active proctype Pool() {
	byte status[NR];
	byte books[NR];                  /* EnvBook::ticket */
	byte me = LEARNER, posts = REQUESTS, revives = REVIVES;
	byte num_pending, need, ready, r, v, t, old, num_settled, death, counted, wanted;
	bool is_touched[W];
	bool is_gone, is_fault, is_rung;

	atomic {
		if
		:: EAGER > 0 -> eager = true
		:: EAGER != 1
		fi;
		run Worker(0, 0);
#if W > 1
		run Worker(1, 1)
#endif
	};
	do
#if CLOSERS
	:: is_closed -> break
	:: !is_closed ->
#else
	::
#endif
		MAYBE_REQUEST;
		dispatch();
		MAYBE_REQUEST;
		if
		:: num_pending == 0 -> break
		:: num_pending > 0 -> need = 1
		:: num_pending > 1 -> need = num_pending
		fi;
		wait_ids();
		collect();
		mend()
	od;
	finish();
died:
	is_over = true
}

#if CLOSERS
active proctype Closer() {
	byte i, me = LEARNER;

	if
	:: close(i)
	:: true
	fi;
died:
	skip
}
#endif

/* ---- the reaper -------------------------------------------------------------------------------------------------- */

/* C++: give_up (reaper.cpp) */
#ifdef NO_GIVE_UP_COMPARE
#define IS_STILL(r_, ticket_) true
#else
#define IS_STILL(r_, ticket_) (state[r_] == STATE(ticket_, RUNNING))
#endif
inline give_up(r_, ticket_) {
	if
	:: atomic { IS_STILL(r_, ticket_) -> state[r_] = STATE(ticket_, CONDEMNED); assert(began_at[r_] == looked) };
#ifndef LATE_OVERDUE
		STEP(dead[w] = OVERDUE);
#endif
		settle(r_, ticket_, OVERDUE);
#ifdef LATE_OVERDUE
		STEP(dead[w] = OVERDUE);
#endif
		count_results(1);
		STEP(sigkill[w] = true);
		condemn_worker(w, NEIGHBOUR)
	:: !IS_STILL(r_, ticket_)
	fi
}

/* C++: check_deadlines (reaper.cpp), is_overdue (reaper.cpp). Two looks; the clock says that a limit lies between them.
 * The command that hangs is the one that the state names, if there is no progress after it was read.
 */
#ifdef BLAME_TICKET
#define SUSPECT STATE(ticket[ROW(w, l)], RUNNING)
#else
#define SUSPECT state[ROW(w, l)]
#endif
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
	:: is_hit -> STEP(c = SUSPECT; is_hit = (STATE_PHASE(c) == RUNNING); c = STATE_TICKET(c))
	:: else
	fi;
#ifndef NO_SECOND_PROGRESS
	if
	:: is_hit -> STEP(is_hit = (progress[w] == looked))
	:: else
	fi;
#endif
	if
	:: is_hit -> give_up(ROW(w, l), c)
	:: else
	fi;
	atomic { looked = 0; l = 0; c = 0; is_hit = false; UNLOCK }
}

/* C++: loop (reaper.cpp), on_event (reaper.cpp) */
active proctype Reaper() {
	byte me = REAPER, limits = LIMITS;
	byte w, l, t, c, old, num_settled, death, looked, event_generation;
	bool is_gone, is_hit;

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
