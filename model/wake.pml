/* Tickets, row states, waking, aborts and death: every interleaving of a learner, its workers and their reaper.
 * Words, bounds and bells are in words.pml; docs/MODEL.md says what is modelled and what is not. `make model` runs it.
 *
 *   Pool ── tickets, bell ──► Worker × W ── done, count, bell ──► Pool       Environment kills, empties store buffers
 *     └──── revive, close ──► Reaper ────── done, count, bell ──► Pool       Closer closes the pool under the caller
 *
 * The learner ends in every run: if it does not, a wake-up was lost, or there is a deadlock.
 */
#include "words.pml"

/* ---- aborting commands: by the reaper's thread, and by the learner's after it has written tickets ----------------------- */

/* C++: write_fault (reaper.cpp) */
#define WRITE_FAULT(r_, ticket_, fault_) assert(SCRIBBLES || (last_fault[r_] < ticket_ && last_result[r_] < ticket_ && done[r_] <= ticket_)); \
	fault[r_] = fault_; last_fault[r_] = ticket_
inline write_fault(r_, ticket_, fault_) {
#ifdef EARLY_DONE
	STEP(done[r_] = ticket_);
	STEP(WRITE_FAULT(r_, ticket_, fault_))
#else
	STEP(WRITE_FAULT(r_, ticket_, fault_));
	STEP(done[r_] = ticket_)
#endif
}

/* C++: abort_command (reaper.cpp) */
#ifdef ROB_THE_LIVING
#define IS_PUBLISHING(ticket_) false
#elif defined(NO_ROB)
#define IS_PUBLISHING(ticket_) (old == STATE(ticket_, PUBLISHING))
#else
#define IS_PUBLISHING(ticket_) (old == STATE(ticket_, PUBLISHING) && !is_gone)
#endif
#ifdef ROB_LATER
#define IS_OTHER(ticket_) false
#else
#define IS_OTHER(ticket_) (STATE_TICKET(old) != ticket_ && STATE_TICKET(old) + 1 != ticket_)
#endif
#define IS_OUT_OF_REACH(ticket_) (old == STATE(ticket_, ABORTED) || IS_PUBLISHING(ticket_) || IS_OTHER(ticket_))
#ifdef NO_TAKE_CAS
#define IS_SAME(r_) true
#else
#define IS_SAME(r_) (state[r_] == old)
#endif
inline abort_command(r_, ticket_, fault_) {
	STEP(old = state[r_]);
	do
	:: IS_OUT_OF_REACH(ticket_) -> old = 0; break
	:: atomic { !IS_OUT_OF_REACH(ticket_) && IS_SAME(r_) -> state[r_] = STATE(ticket_, ABORTED); old = 0 };
		write_fault(r_, ticket_, fault_);
		num_aborted++;
		break
	:: atomic { !IS_OUT_OF_REACH(ticket_) && !IS_SAME(r_) -> old = state[r_] }
	od
}

inline abort_row(r_, fault_) {
	STEP(t = ticket[r_]);
	if
#ifdef ABORT_THE_DONE
	:: true ->
#else
	:: WHEN(done[r_] == t)
	:: WHEN(done[r_] != t) ->
#endif
		abort_command(r_, t, fault_)
	OR_DIE
	fi
}

/* C++: abort_commands (reaper.cpp) */
inline abort_commands(w_, fault_) {
	STEP(is_gone = (dead[w_] == DIED));
	abort_row(ROW(w_, 0), fault_);
#if R > 1
	abort_row(ROW(w_, 1), fault_);
#endif
#if R > 2
	abort_row(ROW(w_, 2), fault_);
#endif
#ifndef NO_ABORTED_COUNT
	if
	:: num_aborted -> count_results(num_aborted)
	:: else
	fi;
#endif
#ifndef NO_REAPER_RING
	ring_pool();
#endif
	t = 0; is_gone = false; num_aborted = 0
}

/* C++: mark_dead (reaper.cpp). With the mutex. */
inline mark_dead(w_) {
	is_watched[w_] = false;
#ifdef LATE_DEAD
	abort_commands(w_, DIED);
#endif
	STEP(death = dead[w_]; dead[w_] = DIED);
#if SPINNERS && !defined(NO_SPIN_CLEAR)
	STEP(spinners = spinners & (255 - BIT(w_)));
#endif
#ifndef NO_PARKED_CLEAR
	STEP(worker_parked[w_] = false);
#endif
#if STOPS
	if
	:: stuck[w_] != NO_SERVER -> is_gone = true; abort_row(ROW(w_, stuck[w_]), OVERDUE)
	:: else
	fi;
	atomic { stuck[w_] = NO_SERVER; num_aborted = 0 };
#endif
#ifndef LATE_DEAD
#if SCRIBBLES && defined(EARLY_REAPED)
	STEP(reaped[w_] = true);
#endif
	abort_commands(w_, (death == OVERDUE -> NEIGHBOUR : DIED));
#endif
#if SCRIBBLES && !defined(EARLY_REAPED)
	/* If no words were overwritten, neither this nor the ring after it is needed. */
	STEP(reaped[w_] = true);
#ifndef NO_REAPED_RING
	ring_pool();
#endif
#endif
	death = 0
}

#ifdef NO_LOCK
#define LOCK skip
#else
#define LOCK atomic { !mutex -> mutex = true }
#endif
#define UNLOCK mutex = false

/* ---- the worker -------------------------------------------------------------------------------------------------- */

/* C++: flush (publish.cpp) */
inline flush() {
	if
#ifndef NO_FLUSH
	:: group -> count_results(group); group = 0
#endif
	:: else
	fi
}

/* C++: begin_activity (protocol.hpp), end_activity (protocol.hpp). Progress is odd while the worker is at something; only then `current` names a server. */
#if OVERLAP
#define SAY(what_) STEP(running[w] = what_)
#else
#define SAY(what_) skip
#endif
inline report_begin(r_, what_) {
#if LIMITS
#ifdef LATE_PROGRESS
	SAY(what_);
	STEP(current[w] = (r_) % R);
#endif
	STEP(progress[w]++; if :: what_ == COMMAND -> began_at[r_] = progress[w] :: else -> early_at[w] = progress[w] fi);
#ifndef LATE_PROGRESS
	SAY(what_);
	STEP(current[w] = (r_) % R)
#endif
#else
	skip
#endif
}

inline report_end(r_) {
#if LIMITS
#ifdef EARLY_PROGRESS
	STEP(progress[w]++; began_at[r_] = 0);
#endif
	STEP(current[w] = NO_SERVER);
#ifndef EARLY_PROGRESS
	STEP(progress[w]++; began_at[r_] = 0)
#endif
#else
	skip
#endif
}

/* C++: start_command (protocol.hpp), perform (env_calls.cpp) */
#ifdef NO_TAKE_CHECK
#define IS_ABORTED(t_) false
#else
#define IS_ABORTED(t_) (STATE_TICKET(old) == t_)
#endif
#ifdef NO_TAKE_COMPARE
#define IS_UNMOVED(r_) true
#else
#define IS_UNMOVED(r_) (state[r_] == old)
#endif
#define TAKE(r_, t_) DRAIN(w); state[r_] = STATE(t_, RUNNING); old = 0; assert(executed[r_] < t_ && IS_NEXT(r_, t_) && IS_ADDRESSED(r_)); executed[r_] = t_; \
	BEGIN(r_, t_)

/* The result of a command goes to the row that was set when it began. No reset is left out. Only an object that was reset does a step. */
#if SPARES
#if KILLS
#define IS_NEXT(r_, t_) true
#else
#define IS_NEXT(r_, t_) (executed[r_] + 1 == t_)
#endif
#define BEGIN(r_, t_) \
	goes_to = row[r_]; \
	if :: kind[r_] == RESET -> reset_life[r_] = my_life :: else -> assert(reset_life[r_] == my_life) fi
#define WRITE_ROW(r_) assert(row[r_] == goes_to); wrote[r_] = row[r_]
#elif REPLAYS
/* Only an object that was reset does a step, and after the calls that came before it. */
#define IS_NEXT(r_, t_) true
#define BEGIN(r_, t_) \
	assert(has_calls[w]); \
	if :: kind[r_] == RESET -> at[r_] = 1 :: else -> assert(at[r_] > 0); at[r_]++ fi
#define WRITE_ROW(r_) if :: deviations && phase[r_] == REPLAYING -> deviations--; place[r_] = 9 :: place[r_] = at[r_] fi
#else
#define IS_NEXT(r_, t_) true
#define BEGIN(r_, t_) skip
#define WRITE_ROW(r_) skip
#endif

/* An env may hang, and then only a deadline helps. */
inline hang() {
#if HANGS
	if
	:: true
	:: atomic { WHEN(hangs && w == 0) -> hangs--; hung[w] = true };
		gone[me] || is_over -> goto died
	fi
#else
	skip
#endif
}

#define OWNS(r_, t_) assert(state[r_] == STATE(t_, PUBLISHING) && last_fault[r_] < t_)
#ifdef NO_CLAIM
#define IS_MINE(r_, t_) true
#else
#define IS_MINE(r_, t_) (state[r_] == STATE(t_, RUNNING))
#endif

/* C++: publish (publish.cpp), claim_result (protocol.hpp), finish (publish.cpp) */
inline publish(r_, t_) {
	if
	:: atomic { WHEN(IS_MINE(r_, t_)) -> DRAIN(w); state[r_] = STATE(t_, PUBLISHING); data[r_] = 0 };
#ifdef EARLY_COUNT
		count_results(1);
		group--;
#endif
#ifdef DONE_BEFORE_DATA
		STEP(OWNS(r_, t_); STORE_DONE(r_, t_); last_result[r_] = t_);
#endif
		STEP(OWNS(r_, t_); data[r_] = t_; fault[r_] = NONE; WRITE_ROW(r_));
#ifndef DONE_BEFORE_DATA
		STEP(OWNS(r_, t_); STORE_DONE(r_, t_); last_result[r_] = t_);
#endif
		group++;
		if
		:: eager -> flush()
		:: else
		fi
	:: WHEN(!IS_MINE(r_, t_))
	OR_DIE
	fi
}

/* C++: run_command (loop.cpp) */
inline do_command(r_, t_) {
	STEP(old = state[r_]);
	if
	:: IS_ABORTED(t_)
	:: atomic { WHEN(!IS_ABORTED(t_) && IS_UNMOVED(r_)) -> TAKE(r_, t_) };
		report_begin(r_, COMMAND);
		hang();
		publish(r_, t_);
		report_end(r_)
	:: WHEN(!IS_ABORTED(t_) && !IS_UNMOVED(r_))
	OR_DIE
	fi;
	served[(r_) % R] = t_; old = 0
}

/* C++: run_staged_reset (loop.cpp). Only if no command waits, or after some sweeps. */
#define IS_STAGED(r_) (row[r_] == STAGED)
#if SPARES
inline look_for_staged(l_) {
	if
	:: !has_staged ->
		STEP(t = ticket[ROW(w, l_)]);
		if
		:: t != served[l_] && IS_STAGED(ROW(w, l_)) ->
			has_staged = true;
			do_command(ROW(w, l_), t);
#ifndef NO_STAGED_FLUSH
			flush()
#endif
		:: else
		fi
	:: has_staged
	fi
}

inline do_staged() {
	look_for_staged(0);
#if R > 1
	look_for_staged(1);
#endif
#if R > 2
	look_for_staged(2);
#endif
	t = 0
}
#endif

/* One row of a sweep. */
inline visit(l_) {
#if REQUESTS && defined(EARLY_REQUESTS)
	STEP(is_interrupted = (requests[w] != requests_seen));
#endif
	STEP(t = ticket[ROW(w, l_)]);
	if
	:: t == served[l_]
#if SPARES
	:: t != served[l_] && IS_STAGED(ROW(w, l_))
#endif
	:: else ->
#if REQUESTS && !defined(NO_REQUEST_CHECK)
#ifndef EARLY_REQUESTS
		STEP(is_interrupted = (requests[w] != requests_seen));
#endif
		if
		:: is_interrupted -> goto end_of_sweep
		:: else
		fi;
#endif
		has_worked = true;
		do_command(ROW(w, l_), t)
	fi;
	is_interrupted = false
}

/* C++: sweep (loop.cpp) */
inline sweep() {
	visit(0);
#if R > 1
	visit(1);
#endif
#if R > 2
	visit(2);
#endif
end_of_sweep:
	if
#ifdef NO_INTERRUPT_FLUSH
	:: has_worked && !is_interrupted -> flush()
#else
	:: has_worked -> flush()
#endif
	:: else
	fi;
	t = 0
}

/* C++: run_until (loop.cpp), run_server (loop.cpp). In between: answer (worker/calls.py). */
inline answer() {
	STEP(t = ticket[request_row[w]]);
	if
#ifndef NO_RUN_UNTIL
	:: t != served[request_row[w] % R] && t <= request_after[w] -> do_command(request_row[w], t); flush()
#endif
	:: else
	fi;
	STEP(assert(executed[request_row[w]] <= request_after[w] && served[request_row[w] % R] == request_after[w]);
		requests_seen++; replies[w]++; t = 0)
}

/* C++: reset_early (loop.cpp) */
inline reset_early() {
	early--;
	report_begin(ROW(w, 0), EARLY);
	hang();
	report_end(ROW(w, 0))
}

/* C++: wait_for_commands (loop.cpp), sleep_on_bell (protocol.hpp) */
inline wait() {
#if SPINNERS
	spin_for(w, worker_bell[w]);
#endif
	do
	:: is_rung -> break
	:: else ->
		park(worker_bell[w], worker_parked[w], worker_asleep[w]);
		STEP(is_rung = worker_bell[w])
	od;
	is_rung = false
}

/* C++: is_abandoned (loop.cpp). A process is killed before it sees this. */
#if THREADS && !defined(NO_GIVEN_UP)
#define MUST_END(w_) (stop[w_] || dead[w_] == OVERDUE)
#else
#define MUST_END(w_) stop[w_]
#endif
inline look_at_stop() {
#if ENDS || THREADS
	if
	:: WHEN(MUST_END(w)) -> break
	:: WHEN(!MUST_END(w))
	OR_DIE
	fi
#else
	skip
#endif
}

#if SPARES
#ifdef FORGET_STAGED
#define HAS_STAGED false
#else
#define HAS_STAGED has_staged
#endif
#define FORGET_IT has_staged = false; goes_to = 0
#else
#define HAS_STAGED false
#define FORGET_IT skip
#endif

#if !REPLAYS
#define FORGET_OBJECTS skip
#elif R > 1
#define FORGET_OBJECTS at[ROW(w, 0)] = 0; at[ROW(w, 1)] = 0
#else
#define FORGET_OBJECTS at[ROW(w, 0)] = 0
#endif

/* C++: run (loop.cpp) */
inline run_loop() {
	do
	::
#ifdef EARLY_STOP
		look_at_stop();
#endif
#ifndef LATE_SEEN
		STEP(worker_bell[w] = false);
#endif
#ifndef EARLY_STOP
		look_at_stop();
#endif
		sweep();
#if REQUESTS
		if
		:: WHEN(is_interrupted || requests[w] != requests_seen) -> answer(); has_worked = true
		:: WHEN(!is_interrupted && requests[w] == requests_seen)
		OR_DIE
		fi;
#endif
#ifdef LATE_SEEN
		STEP(worker_bell[w] = false);
#endif
#if SPARES && !defined(NO_STAGED)
		if
		:: true -> do_staged()
		:: has_worked
		fi;
#endif
		if
		:: !has_worked && !HAS_STAGED -> wait()
#if OVERLAP
		:: !has_worked && early -> reset_early()
#endif
		:: else
		fi;
		has_worked = false; is_interrupted = false; FORGET_IT
	od
}

#if COROUTINES
#include "coroutines.pml"
#endif

proctype Worker(byte w; byte me) {
	byte served[R];
#if COROUTINES
	byte taken[R];
#endif
	byte t, old, group, requests_seen, early = OVERLAP;
	bool has_worked, is_interrupted, is_rung;
#if SPARES
	bool has_staged;
	byte goes_to;
#endif
#if LIVES
	byte my_life;
#endif

begin:
#if COROUTINES
	run Watcher(w, me);
	run_coroutines();
#else
	run_loop();
#endif
	STEP(exited[w] = true);
	goto end_of_worker;
died:
	atomic {
		ended[w] = true; before[me] = 255;
		t = 0; old = 0; group = 0; has_worked = false; is_interrupted = false; is_rung = false; FORGET_IT
	};
end_of_worker:
	atomic {
		/* C++: Loop (loop.cpp): a successor begins after the commands that are done. */
		respawn[w] -> respawn[w] = false; ended[w] = false; requests_seen = requests[w]; BE_RENEWED; FORGET_OBJECTS;
#ifdef NO_LOOP_DONE
		served[0] = 0;
#else
		served[0] = done[ROW(w, 0)];
#if R > 1
		served[1] = done[ROW(w, 1)];
#endif
#if R > 2
		served[2] = done[ROW(w, 2)];
#endif
#endif
		goto begin
	}
}

#include "restarts.pml"
#include "learner.pml"
#if SPARES
#include "spares.pml"
#endif
#if REPLAYS
#include "replays.pml"
#endif
#include "reaper.pml"
