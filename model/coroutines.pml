/* A worker whose envs have coroutines: it takes commands while others run, and publishes them in any order. A native thread sleeps on
 * its bell, and makes an eventfd readable, for which the event loop waits.
 */
bool worker_event[W];
bool is_swept[W];  /* `swept_` has been stored since the native thread read it; worker_bell is true if the bell has moved since then */
#define HAS_MOVED (worker_bell[w] || is_swept[w])

/* C++: watch_bell (coroutine_loop.cpp) */
proctype Watcher(byte w; byte me) {
	do
	:: is_over -> break
	:: !is_over ->
		STEP(is_swept[w] = false);
		if
		:: WHEN(HAS_MOVED) ->
#ifndef NO_WATCHER_EVENT
			STEP(worker_event[w] = true);
#endif
			if
			:: WHEN(is_swept[w])
			:: is_over -> break
			OR_DIE
			fi
		:: WHEN(!HAS_MOVED) -> park(HAS_MOVED, worker_parked[w], worker_asleep[w])
		OR_DIE
		fi
	od;
died:
	skip
}

/* C++: begin (coroutine_loop.cpp) */
inline take(l_) {
	STEP(t = ticket[ROW(w, l_)]);
	if
	:: t == served[l_]
	:: else ->
		STEP(old = state[ROW(w, l_)]);
		served[l_] = t;
		if
		:: IS_ABORTED(t)
		:: atomic { WHEN(!IS_ABORTED(t) && IS_UNMOVED(ROW(w, l_))) -> TAKE(ROW(w, l_), t); taken[l_] = t }
		:: WHEN(!IS_ABORTED(t) && !IS_UNMOVED(ROW(w, l_)))
		OR_DIE
		fi
	fi;
	t = 0; old = 0
}

/* C++: receive_calls (coroutine_loop.cpp) */
inline receive_calls() {
#ifndef LATE_CLEAR_EVENT
	STEP(worker_event[w] = false);
#endif
#ifndef LATE_SWEPT
	STEP(worker_bell[w] = false; is_swept[w] = true);
#endif
#ifdef LATE_CLEAR_EVENT
	STEP(worker_event[w] = false);
#endif
	look_at_stop();
	take(0);
#if R > 1
	take(1);
#endif
#ifdef LATE_SWEPT
	STEP(worker_bell[w] = false; is_swept[w] = true);
#endif
	skip
}

/* C++: accept (coroutine_loop.cpp), end (coroutine_loop.cpp) */
inline end_call(l_) {
	publish(ROW(w, l_), taken[l_]);
	flush();
	taken[l_] = 0
}

/* Python: run (worker/coroutine_server.py) */
inline run_coroutines() {
	receive_calls();
	do
	:: WHEN(worker_event[w]) -> receive_calls()
	:: WHEN(taken[0]) -> end_call(0)
#if R > 1
	:: WHEN(taken[1]) -> end_call(1)
#endif
	:: is_over -> break
	OR_DIE
	od
}
