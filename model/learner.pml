/* The learner: its caller, and who closes the pool under it. Part of wake.pml. */

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

/* C++: check_deaths_of (send.cpp) */
inline check_deaths_of(w_) {
	if
	:: is_restarting[w_] || !dead[w_]
	:: !is_restarting[w_] && dead[w_] -> condemn_worker(w_, DIED)
	fi
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

/* C++: dispatch (send.cpp), give (recovery.cpp): publish_ticket. What is commanded to a successor its predecessor must not see. */
#if !REVIVES
#define PUBLISH(r_) ticket[r_] = PUBLISHED(r_)
#elif defined(NO_HOLD)
#define PUBLISH(r_) ADDRESS(r_); ticket[r_] = PUBLISHED(r_)
#else
#define PUBLISH(r_) ADDRESS(r_); if :: is_held[(r_) / R] :: else -> ticket[r_] = PUBLISHED(r_) fi
#endif

#if !SPARES
#define PLAN(r_) if :: status[r_] == IDLE && books[r_] < T -> is_touched[(r_) / R] = true :: else fi
#define PLAN_ALL PLAN(0); if :: NR > 1 -> PLAN(1 % NR) :: else fi; if :: NR > 2 -> PLAN(2 % NR); PLAN(3 % NR) :: else fi

inline write_ticket(r_) {
	if
	:: atomic { status[r_] == IDLE && books[r_] < T -> status[r_] = PENDING; num_pending++; books[r_]++; PUBLISH(r_) }
	:: else
	fi
}

/* C++: dispatch (send.cpp). Commands all rows that are idle. */
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

inline scan_row(r_) {
	if
	:: status[r_] == PENDING && ready < need ->
		if
		:: atomic { done[SERVER(r_)] == books[SERVER(r_)] -> ready++; is_fault = is_fault || fault[SERVER(r_)] }
		:: done[SERVER(r_)] != books[SERVER(r_)]
		fi
	:: else
	fi
}

/* C++: scan (wait.cpp) */
inline scan() {
	ready = 0;
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
/* C++: settle_dead (wait.cpp). What the dead have scrambled is written once more, and condemned: its ring ends the rest at once. */
inline settle_dead_row(r_) {
	if
	:: status[r_] == PENDING && done[r_] != books[r_] && !is_restarting[(r_) / R] && buried[(r_) / R] ->
#ifndef NO_TICKET_AGAIN
		ticket[r_] = books[r_];
#endif
#ifndef NO_STATE_AGAIN
		state[r_] = STATE(books[r_] - 1, 0);
#endif
		check_deaths_of((r_) / R);
		/* Or the learner would come here for ever. The thread of a restart that failed may be at it, too: the GIL is not in the model. */
		assert(done[r_] == books[r_] || state[r_] == STATE(books[r_], CONDEMNED))
	:: else
	fi
}

inline settle_dead() {
	settle_dead_row(0);
#if NR > 1
	settle_dead_row(1)
#endif
}
#endif

/* C++: rest (wait.cpp). It may spin twice, with the GIL and without: that is once, for longer. */
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
#if SPARES && defined(EARLY_TEND)
		tend();
#endif
#ifndef LATE_BELL
		bell = false;
#endif
#ifndef LATE_COUNT
		counted = count;
#endif
#if SPARES && !defined(EARLY_TEND)
		tend();
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
#if SCRIBBLES && !defined(NO_SETTLE_DEAD)
		settle_dead();
#endif
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
	:: v < W + 3 -> r = (before[v] < r -> before[v] : r); v++
	:: else -> v = 0; break
	od;
	count = count - r;
	want = (want > r -> want - r : 0);
	do
	:: v < W + 3 -> before[v] = (before[v] == 255 -> 255 : before[v] - r); v++
	:: else -> v = 0; r = 0; break
	od
}

/* The ghosts of a row whose result was received: nobody may write it any more. What is not read again is forgotten. */
#define RECEIVE(r_) honest[r_] = books[r_]; settled[r_] = books[r_]; data[r_] = 0; fault[r_] = NONE; num_pending--

#if !SPARES
/* C++: settle (gather.cpp), take_faults (faults.cpp). What is there is received, once and as it was published. */
inline collect() {
	do
	:: atomic {
			r < NR ->
			if
			:: status[r] == PENDING && done[r] == books[r] && fault[r] == NONE ->
				assert(IS_SCRIBBLED(r) || (data[r] == books[r] && honest[r] == books[r] && settled[r] < books[r]));
				status[r] = IDLE;
				RECEIVE(r)
			:: status[r] == PENDING && done[r] == books[r] && fault[r] != NONE ->
				assert(SCRIBBLES || (settled[r] == books[r] && honest[r] < books[r]));
				status[r] = FAULTED;
				RECEIVE(r)
			:: else
			fi;
			r++
		}
	:: atomic { r == NR -> rebase(); break }
	od
}

#endif

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

#if !SPARES
#if R > 1
#define NOTE_MORTALS(w_) NOTE_MORTAL(ROW(w_, 0)); NOTE_MORTAL(ROW(w_, 1))
#else
#define NOTE_MORTALS(w_) NOTE_MORTAL(ROW(w_, 0))
#endif

/* A faulted row is commanded again, if its worker lives or is to live again: Ledger::check_workers, Recovery. */
inline mend() {
#if KILLS || LIMITS
	do
	:: r < NR ->
		if
		:: status[r] == FAULTED ->
			if
			:: !dead[r / R] || is_restarting[r / R] -> status[r] = IDLE
#if REVIVES
			/* C++: begin_replacement (recovery.cpp) */
			:: atomic {
					dead[r / R] && !is_restarting[r / R] && revives ->
					revives--; is_restarting[r / R] = true; is_held[r / R] = true; order = r / R; status[r] = IDLE;
					NOTE_MORTALS(r / R); RENEW(r / R)
				}
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

/* Every request is answered, or its worker is dead; every worker ends, and the dead are buried. A thread that was given up ends, too. */
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

#if !SPARES
#if REQUESTS
#define MAYBE_REQUEST if :: posts -> posts--; post_request(0) :: true fi
#else
#define MAYBE_REQUEST skip
#endif

active proctype Pool() {
	byte status[NR];
	byte me = LEARNER, posts = REQUESTS, revives = REVIVES;
	byte num_pending, need, ready, r, v, t, old, num_settled, counted, wanted;
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
#if NEED > 1
		:: num_pending > 1 -> need = num_pending
#endif
		fi;
		wait_ids();
		collect();
		mend()
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
