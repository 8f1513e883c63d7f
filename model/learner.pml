/* The learner: its caller, and the thread that closes the pool meanwhile. Part of wake.pml. */

/* ---- the learner ------------------------------------------------------------------------------------------------- */

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

inline check_touched(w_) {
#ifdef NO_CHECK_DEATHS
	skip
#else
	if
	:: is_touched[w_] -> check_deaths_of(w_)
	:: else
	fi
#endif
}

inline check_deaths() {
#if KILLS || LIMITS
	check_touched(0);
#if W > 1
	check_touched(1)
#endif
#else
	skip
#endif
}

#if !SPARES && !REPLAYS
#define PLAN(r_) if :: TAKES_COMMANDS(r_) && newest_ticket[r_] < T -> is_touched[(r_) / R] = true :: else fi
#define PLAN_ALL PLAN(0); if :: NR > 1 -> PLAN(1 % NR) :: else fi; if :: NR > 2 -> PLAN(2 % NR); PLAN(3 % NR) :: else fi

inline write_ticket(r_) {
	if
	:: atomic { TAKES_COMMANDS(r_) && newest_ticket[r_] < T -> move_env(r_, PENDING); num_pending++; newest_ticket[r_]++; PUBLISH(r_) }
#if WATCHES
	:: true  /* no task gives it a command now */
#endif
	:: else
	fi
}

/* C++: dispatch (send.cpp). Gives a command to all idle rows. */
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

#endif

/* Suspended envs are never done, whatever their words say. */
#ifdef NO_NEVER_DONE
#define IS_COUNTED_OUT(r_) false
#else
#define IS_COUNTED_OUT(r_) IS_IN_REPLAY(r_)
#endif
inline scan_row(r_) {
	if
	:: status[r_] == PENDING && num_ready < num_needed && !IS_COUNTED_OUT(r_) ->
		if
		:: atomic { done[SERVER(r_)] == newest_ticket[SERVER(r_)] -> num_ready++; is_fault = is_fault || fault[SERVER(r_)] }
		:: done[SERVER(r_)] != newest_ticket[SERVER(r_)]
		fi
	:: else
	fi
}

/* C++: scan (wait.cpp) */
inline scan() {
	num_ready = 0;
	scan_row(0);
#if NR - SPARES > 1
	scan_row(1);
#endif
#if NR - SPARES > 2
	scan_row(2);
	scan_row(3);
#endif
}

#if SCRIBBLES
/* C++: abort_commands_of_dead_workers (wait.cpp). Rewrites the words that a dead worker has overwritten, and aborts its commands; the ring ends the wait. */
inline abort_row_of_dead_worker(r_) {
	if
	:: status[r_] == PENDING && done[r_] != newest_ticket[r_] && !is_restarting[(r_) / R] && reaped[(r_) / R] ->
#ifndef NO_TICKET_AGAIN
		ticket[r_] = newest_ticket[r_];
#endif
#ifndef NO_STATE_AGAIN
		state[r_] = STATE(newest_ticket[r_] - 1, 0);
#endif
		check_deaths_of((r_) / R);
		/* Otherwise the learner would come here without limit. The thread of a failed restart may do the same: the GIL is not in the model. */
		assert(done[r_] == newest_ticket[r_] || state[r_] == STATE(newest_ticket[r_], ABORTED))
	:: else
	fi
}

inline abort_commands_of_dead_workers() {
	abort_row_of_dead_worker(0);
#if NR > 1
	abort_row_of_dead_worker(1)
#endif
}
#endif

#if WATCHES
/* C++: stop_watching (protocol.hpp), clear_event (platform.hpp) */
inline stop_watching() {
	STEP(parked = false);
#ifndef LATE_CLEAR
	STEP(event = false)
#endif
}

#define IS_ANY_FREE ((TAKES_COMMANDS(0) && newest_ticket[0] < T) || (TAKES_COMMANDS(NR - 1) && newest_ticket[NR - 1] < T))
/* C++: watch (wait.cpp), watch_bell (protocol.hpp). */
inline rest() {
	STEP(parked = true);
	if
#ifdef NO_WATCH_LOOK
	:: true ->
#else
	:: bell
	:: !bell ->
#endif
#ifdef LATE_CLEAR
		STEP(event = false);
#endif
		do
		:: event -> break
		:: !event && IS_ANY_FREE -> dispatch()
		od
	fi
}
#else
#define stop_watching() skip
/* C++: wait_for_bell (wait.cpp). It may spin twice, with the GIL and without: modelled as one longer spin. */
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
#endif

#if REPLAYS && !defined(NO_REPLAY_RING_AT)
#define NUM_MISSING (IS_ANY_REPLAYING -> 1 : num_needed - num_ready)
#else
#define NUM_MISSING num_needed - num_ready
#endif

/* Ctrl-C ends the wait and changes nothing else. Python: _run (pool/receiving.py) follows a wait, and may be skipped. */
#if INTERRUPTS
#define MAY_LEAVE if :: interrupts -> interrupts--; is_left = true; break :: true fi
#define LEAVE_BEFORE_HANDLING if :: interrupts && (is_fault || is_event) -> interrupts--; is_left = true :: true fi
#else
#define MAY_LEAVE skip
#define LEAVE_BEFORE_HANDLING skip
#endif

#if !REPLAYS
#define IS_ANY_EVENT false
#endif

/* C++: has_event (wait.cpp), advance_replays (replay.cpp) */
#if REVIVES
inline look_for_events() {
#if REPLAYS
	advance_replays();
#endif
#ifdef NO_HAS_EVENT
	is_event = IS_ANY_EVENT
#else
	is_event = is_notified || IS_ANY_EVENT
#endif
}
#endif
/* C++: wait_until_done (wait.cpp), prepare_wait (wait.cpp), wait_for_event (wait.cpp) */
inline wait_until_done() {
	do
	::
		stop_watching();
#if SPARES && defined(EARLY_TEND)
		flush_deferred_resets();
#endif
#if REVIVES && defined(EARLY_EVENT)
		look_for_events();
#endif
#ifndef LATE_BELL
		bell = false;
#endif
#ifndef LATE_COUNT
		counted = count;
#endif
#if SPARES && !defined(EARLY_TEND)
		flush_deferred_resets();
#endif
#if REVIVES
#ifndef EARLY_EVENT
		look_for_events();
#endif
		if
		:: is_event -> break
		:: !is_event
		fi;
#endif
#ifdef TRUST_COUNT
		if
		:: armed && counted < armed
		:: else -> scan()
		fi;
#else
#if AWAITS
		if
		:: is_for_event
		:: !is_for_event -> scan()
		fi;
#else
		scan();
#endif
#endif
#ifdef LATE_COUNT
		counted = count;
#endif
		if
		:: is_fault || num_ready >= num_needed -> break
		:: else
		fi;
#if SCRIBBLES && !defined(NO_ABORT_DEAD)
		abort_commands_of_dead_workers();
#endif
#if CLOSERS
		if
		:: is_closed -> break
		:: !is_closed
		fi;
#endif
#ifdef KEEP_RING_AT
		if
		:: !armed -> atomic { armed = counted + num_needed - num_ready; ring_at = armed }
		:: else
		fi;
#elif !defined(LATE_RING_AT)
		atomic { armed = counted + NUM_MISSING; ring_at = armed };
#endif
		if
#ifndef NO_RECOUNT
		:: count != counted
		:: count == counted ->
#else
		:: true ->
#endif
#ifdef LATE_RING_AT
			ring_at = counted + num_needed - num_ready;
#endif
#ifdef LATE_BELL
			bell = false;
#endif
			rest();
			MAY_LEAVE
		fi
	od;
	LEAVE_BEFORE_HANDLING;
	atomic { counted = 0; armed = 0; num_needed = 0; num_ready = 0 }
}

/* Only differences of count matter. Counting from the lowest value in use keeps the number of states small. */
inline rebase() {
	r = count;
	do
	:: v < W + 3 -> r = (before[v] < r -> before[v] : r); v++
	:: else -> v = 0; break
	od;
	count = count - r;
	ring_at = (ring_at > r -> ring_at - r : 0);
	do
	:: v < W + 3 -> before[v] = (before[v] == 255 -> 255 : before[v] - r); v++
	:: else -> v = 0; r = 0; break
	od
}

/* The ghosts of a row whose result was received: no thread may write it. Values that are not read again are cleared. */
#define RECEIVE(r_) last_result[r_] = newest_ticket[r_]; last_fault[r_] = newest_ticket[r_]; data[r_] = 0; fault[r_] = NONE; num_pending--

#if !SPARES && !REPLAYS
/* C++: mark_received (gather.cpp), drain (recovery.cpp). Each result is received once, and as it was published. */
inline collect() {
	do
	:: atomic {
			r < NR ->
			if
			:: status[r] == PENDING && done[r] == newest_ticket[r] && fault[r] == NONE ->
				assert(IS_SCRIBBLED(r) || (data[r] == newest_ticket[r] && last_result[r] == newest_ticket[r] && last_fault[r] < newest_ticket[r]));
				move_env(r, IDLE);
				RECEIVE(r)
			:: status[r] == PENDING && done[r] == newest_ticket[r] && fault[r] != NONE ->
				assert(SCRIBBLES || (last_fault[r] == newest_ticket[r] && last_result[r] < newest_ticket[r]));
				move_env(r, FAULTED);
				RECEIVE(r)
			:: else
			fi;
			r++
		}
	:: atomic { r == NR -> rebase(); break }
	od
}

#endif

/* C++: post_request (pool_state.cpp) */
inline post_request(r_) {
	STEP(request_row[(r_) / R] = r_; request_after[(r_) / R] = newest_ticket[r_]; num_posted[(r_) / R]++);
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

/* All threads of a process are gone; what they stored has arrived. */
#define KILL(w_) DRAIN(w_); gone[w_] = true

#if !SPARES && !REPLAYS
/* A faulted row gets another command if its worker is alive or being restarted: PoolState::check_workers, resolve_fault. */
inline reset_faulted() {
#if KILLS || LIMITS
	do
	:: r < NR ->
		if
		:: status[r] == FAULTED ->
			if
			:: !dead[r / R] || is_restarting[r / R] -> atomic { move_env(r, NEW) }
#if REVIVES
			:: atomic {
					dead[r / R] && !is_restarting[r / R] && revives ->
					revives--; BEGIN_RESTART(r / R); move_env(r, NEW)
				};
#if AWAITS
				if
				:: is_for_event = true  /* Python: _wait_restart (pool/revival.py) */
				:: true
				fi
#endif
#endif
			:: dead[r / R] && !is_restarting[r / R] && !revives
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

#endif

/* C++: close (pool_state.cpp) */
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

/* Every request is answered, or its worker is dead; every worker ends, and the dead are reaped. A thread that was given up ends, too. */
inline finish() {
#if THREADS
	dead[0] != OVERDUE || exited[0];
#endif
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

#if !SPARES && !REPLAYS
#if REQUESTS
#define MAYBE_REQUEST if :: posts -> posts--; post_request(0) :: true fi
#else
#define MAYBE_REQUEST skip
#endif

active proctype Pool() {
	byte status[NR] = IDLE;
	byte me = LEARNER, posts = REQUESTS, revives = REVIVES, retries = RETRIES;
	byte num_pending, num_needed, num_ready, r, v, t, old, num_aborted, counted, armed;
	bool is_touched[W];
	bool is_gone, is_fault, is_event, is_for_event, is_left, is_rung;

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
#if AWAITS
		if
		:: is_for_event && is_restarting[0] -> num_needed = 1; goto to_wait
		:: else -> is_for_event = false
		fi;
#endif
		MAYBE_REQUEST;
		dispatch();
		MAYBE_REQUEST;
		if
		:: num_pending == 0 -> break
		:: num_pending > 0 -> num_needed = 1
#if NEED > 1
		:: num_pending > 1 -> num_needed = num_pending
#endif
		fi;
to_wait:
		wait_until_done();
#if REVIVES
		if
		:: is_left
		:: !is_left && (is_event || is_fault) -> handle_restarts()
		:: !is_left && !is_event && !is_fault
		fi;
#endif
		if
		:: is_left -> is_for_event = false
		:: !is_left -> collect(); reset_faulted()
		fi;
		atomic { is_left = false; is_event = false; is_fault = false }
	od;
	finish();
died:
	is_over = true
}

#endif

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
