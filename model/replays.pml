/* The learner with the policy "replay" or, with TRUNCATES, "truncate". One worker. Part of wake.pml, in place of the Pool of
 * learner.pml.
 *
 *   death ─► envs are suspended ─► restart ─► calls, then the log: RESET, steps ─► the step that was pending, or sent meanwhile
 *
 * A result says how much of its episode the env object has done. The learner knows how much the expected result must have done:
 * so it notices the result of another command, a step that ran twice, and a step that was left out.
 */
#if REPLAYS

/* ---- suspended envs ---------------------------------------------------------------------------------------------- */

/* C++: suspend (replay.cpp). Part of an atomic step. */
#define DROP_REPLAY(r_) event[r_] = NO_EVENT; is_due[r_] = false; call[r_] = NO_CALL
#define HOLD(r_) DROP_REPLAY(r_); move_object(r_, AWAITING_REPLAY)

/* C++: resume_env (replay.cpp), resume_with_fault (replay.cpp), resolve_fault (recovery.cpp). Results so far belong to the replay. */
inline resume_with_fault(r_) {
	if
	:: IS_IN_REPLAY(r_) ->
		DROP_REPLAY(r_);
		move_object(r_, CURRENT);
#ifndef NO_STALE_FAULT
		if
		:: done[r_] == newest_ticket[r_] -> fault[r_] = (status[r_] == PENDING -> DIED : NONE)
		:: else
		fi
#endif
	:: else
	fi
}

/* C++: begin_restart (recovery.cpp). A running replay starts again after this restart. */
#ifdef KEEP_EVENTS
#define FORGET_EVENT(r_) skip
#else
#define FORGET_EVENT(r_) event[r_] = NO_EVENT
#endif
#if TRUNCATES
/* C++: mark_lost (recovery.cpp). The progress of the object is lost with it; a result that was published stays. A command that is
 * not finished yet may be finished until the worker is really gone.
 */
#define HAS_RESULT(r_) (status[r_] == IDLE || (status[r_] == PENDING && done[r_] == newest_ticket[r_] && !fault[r_]))
inline suspend_for_restart(r_) {
	is_late[r_] = !HAS_RESULT(r_);
	if
	:: HAS_RESULT(r_) -> must_begin_episode[r_] = (log_len[r_] > 0 || status[r_] == PENDING)
	:: else
	fi
}

/* C++: mark_lost_late (recovery.cpp). The worker finished the command after all: its env has the result, but no object. */
inline mark_lost_late(r_) {
	if
	:: is_late[r_] && is_restarting[0] && HAS_RESULT(r_) -> is_late[r_] = false; must_begin_episode[r_] = true
	:: else
	fi
}
#else
inline suspend_for_restart(r_) {
	is_due[r_] = false; call[r_] = NO_CALL; FORGET_EVENT(r_);
	if
	:: status[r_] == PENDING || IS_IN_REPLAY(r_) || (status[r_] == IDLE && log_len[r_] > 0 && !must_begin_episode[r_]) -> move_object(r_, AWAITING_REPLAY)
	:: else
	fi
}
#endif

/* ---- replays ----------------------------------------------------------------------------------------------------- */

/* C++: finish_replay (replay.cpp). Python, after a call: _finish (pool/replays.py) */
inline finish_replay(r_) {
	move_object(r_, CURRENT); call[r_] = NO_CALL;
	if
#ifndef DROP_SENT
	:: status[r_] == PENDING -> kind[r_] = FORWARD; is_due[r_] = true
#endif
	:: else
	fi
}

/* C++: issue_replayed (replay.cpp). Part of an atomic step. Without calls the core finishes the replay; that ends a wait for it alone. */
inline give_replayed(r_, ends_wait_) {
	if
	:: step[r_] == log_len[r_] && CALLS -> event[r_] = PLAYED; move_object(r_, PAUSED)
	:: step[r_] == log_len[r_] && !CALLS ->
#ifndef NO_NEWS
		has_news = has_news || ends_wait_;
#endif
		finish_replay(r_)
	:: else -> kind[r_] = (step[r_] == 0 -> RESET : FORWARD); is_due[r_] = true; move_object(r_, REPLAYING)
	fi
}

/* C++: issue (recovery.cpp) */
inline give(r_) {
	if
	:: is_due[r_] ->
		atomic { is_due[r_] = false; newest_ticket[r_]++; PUBLISH(r_) };
#ifndef NO_GIVE_RING
		ring_worker(0);
#endif
#ifndef NO_GIVE_CHECK
		check_deaths_of(0)
#endif
	:: else
	fi
}

/* C++: advance_replays (replay.cpp) */
inline advance_replay(r_) {
	atomic {
		if
		:: phase[r_] == REPLAYING && done[r_] == newest_ticket[r_] ->
			if
			:: fault[r_] -> event[r_] = FAULT; move_object(r_, PAUSED)
			:: !fault[r_] && place[r_] != step[r_] + 1 -> event[r_] = DIFFERS; move_object(r_, PAUSED)
			:: !fault[r_] && place[r_] == step[r_] + 1 ->
				assert(data[r_] == newest_ticket[r_] && last_result[r_] == newest_ticket[r_]);
				step[r_]++;
				give_replayed(r_, is_for_event)
			fi
		:: else
		fi
	}
}

inline give_all() { FOR_ROWS(0, give) }
inline advance_replays() { FOR_ROWS(0, advance_replay); give_all() }

/* C++: begin_replay (replay.cpp). Python: begin (pool/replays.py). An episode that is about to be reset needs no replay. */
inline begin_replay(r_) {
	if
	:: phase[r_] == AWAITING_REPLAY ->
		step[r_] = 0;
		if
#ifndef NO_RESET_AGAIN
		:: status[r_] == PENDING && is_reset[r_] -> move_object(r_, CURRENT); kind[r_] = RESET; is_due[r_] = true
#endif
		:: else -> give_replayed(r_, false)
		fi
	:: else
	fi
}

/* Python: _cut_short (pool/replays.py). C++: resolve_fault (recovery.cpp). The result says that the episode was cut short. */
inline cut_short(r_) {
	resume_with_fault(r_);
	fault[r_] = NONE; log_len[r_] = 0; must_begin_episode[r_] = true;
	if
	:: status[r_] == PENDING -> move_env(r_, IDLE); num_pending--
	:: else
	fi
}

/* Python: _advance (pool/replays.py), check_calls (pool/replays.py), _compare (pool/replays.py) */
inline handle_event(r_) {
	if
	:: event[r_] == PLAYED -> call[r_] = OPEN
	:: event[r_] == DIFFERS -> cut_short(r_)
	:: event[r_] == FAULT -> assert(dead[0]); is_lost = true
	:: event[r_] == NO_EVENT && call[r_] == ANSWERED -> finish_replay(r_)
	:: event[r_] == NO_EVENT && call[r_] == UNANSWERED -> is_call_lost = true
	:: else
	fi;
	event[r_] = NO_EVENT
}

/* ---- faults ------------------------------------------------------------------------------------------------------ */

/* C++: fail_worker (recovery.cpp) */
inline fail_row(r_) {
	if
	:: status[r_] == IDLE && dead[0] -> move_env(r_, FAULTED)
	:: else
	fi
}

/* C++: drain (recovery.cpp), mark_faulted (recovery.cpp). Python: decide_death (pool/fault_policies.py) */
#define HAS_FAULT(r_) (status[r_] == PENDING && !IS_COUNTED_OUT(r_) && done[r_] == newest_ticket[r_] && fault[r_])
inline handle_fault(r_) {
	if
	:: HAS_FAULT(r_) && is_failed -> move_env(r_, FAULTED); num_pending--
#if TRUNCATES
	/* C++: resolve_fault (recovery.cpp), retry_reset (recovery.cpp) */
	:: HAS_FAULT(r_) && !is_failed && is_reset[r_] -> is_due[r_] = true
	:: HAS_FAULT(r_) && !is_failed && !is_reset[r_] -> must_begin_episode[r_] = true; move_env(r_, IDLE); num_pending--
#else
	:: HAS_FAULT(r_) && !is_failed -> HOLD(r_)
#endif
	:: else
	fi
}

/* Python: _decide_death (pool/recovery.py), decide_death (pool/fault_policies.py) */
inline handle_death() {
	if
	:: dead[0] && !is_restarting[0] ->
		if
		:: atomic { revives -> revives--; FOR_ROWS(0, suspend_for_restart); BEGIN_RESTART(0); has_calls[0] = TRUNCATES }
		:: !revives ->
			cancel_restart(0);
			atomic { is_failed = true; FOR_ROWS(0, fail_row) }
		fi
	:: else
	fi
}

/* Python: check_process (pool/workers.py) */
inline check_process() {
	if
	:: gone[0] && !dead[0] && !is_restarting[0] ->
		LOCK;
		if
		:: is_watched[0] -> mark_dead(0)
		:: else
		fi;
		UNLOCK
	:: else
	fi
}

/* Python: handle (pool/recovery.py) */
inline handle() {
	has_news = false;
	handle_restarts();
	atomic {
		if
		:: is_restarted -> is_restarted = false; FOR_ROWS(0, begin_replay)
		:: else
		fi;
		FOR_ROWS(0, handle_event)
	};
	give_all();  /* commands that become due after this line are given by the next wait */
#ifndef FORGET_CALLS
	/* The worker died in a call while no command of its envs was pending: nothing else reports its death. */
	if
	:: is_call_lost -> check_process(); is_lost = true
	:: else
	fi;
#endif
#ifndef FORGET_LOST
	if
	:: is_lost -> handle_death()
	:: else
	fi;
#endif
	if
	:: HAS_FAULT(0) || (NR > 1 && HAS_FAULT(NR - 1)) ->
		handle_death();
		atomic {
			FOR_ROWS(0, handle_fault);
			if
			:: !is_restarting[0] && !is_failed -> FOR_ROWS(0, begin_replay)
			:: else
			fi
		}
	:: else
	fi;
	atomic { is_lost = false; is_call_lost = false; is_failed = false }
}

/* ---- commands and results ---------------------------------------------------------------------------------------- */

#define CAN_SEND(r_) (TAKES_COMMANDS(r_) && sent[r_] < T)

/* C++: dispatch (send.cpp), dispatch_suspended (replay.cpp). A step sent to a suspended env is stored. */
inline send_row(r_) {
	atomic {
		if
		:: CAN_SEND(r_) ->
#if TRUNCATES
			mark_lost_late(r_);
#endif
			move_env(r_, PENDING); num_pending++; sent[r_]++;
			if
#ifndef GIVE_SUSPENDED
			:: IS_IN_REPLAY(r_) -> is_reset[r_] = false
#endif
			:: else ->
				is_reset[r_] = (log_len[r_] == 0 || must_begin_episode[r_]); must_begin_episode[r_] = false;
				kind[r_] = (is_reset[r_] -> RESET : FORWARD);
				newest_ticket[r_]++; is_touched[0] = true; PUBLISH(r_)
			fi
		:: else
		fi
	}
}

/* C++: check_workers (send.cpp). Python: handle_dead_workers (pool/recovery.py) */
inline dispatch() {
	if
	:: (CAN_SEND(0) || CAN_SEND(NR - 1)) && dead[0] -> handle_death(); is_failed = false
	:: else
	fi;
	FOR_ROWS(0, send_row);
	ring_all_touched();
	check_deaths();
	is_touched[0] = false
}

/* C++: mark_received (gather.cpp), record_result (gather.cpp) */
inline collect_row(r_) {
	if
	:: status[r_] == PENDING && !IS_COUNTED_OUT(r_) && done[r_] == newest_ticket[r_] && !fault[r_] ->
		assert(data[r_] == newest_ticket[r_] && last_result[r_] == newest_ticket[r_]);
		assert(place[r_] == (is_reset[r_] -> 1 : log_len[r_] + 1));
		log_len[r_] = place[r_];
		move_env(r_, IDLE);
		num_pending--
	:: else
	fi
}

active proctype Pool() {
	byte status[NR] = IDLE, sent[NR], log_len[NR], step[NR];
	bool is_reset[NR], must_begin_episode[NR], is_due[NR], is_late[NR];
	byte me = LEARNER, revives = REVIVES, retries = RETRIES, awaits = AWAITS;
	byte num_pending, num_needed, num_ready, r, v, t, old, num_aborted, counted, armed, death;
	bool is_touched[W];
	bool is_gone, is_fault, is_event, is_for_event, is_left, is_rung;
	bool is_restarted, is_lost, is_call_lost, is_failed;

	atomic {
		if
		:: EAGER > 0 -> eager = true
		:: EAGER != 1
		fi;
		run Worker(0, 0)
	};
	do
	::
#if AWAITS
		/* Python: wait_until_rebuilt (pool/revival.py). Until the envs are in the state that the user expects. */
		if
		:: awaits -> awaits--; is_for_event = true
		:: true
		fi;
		if
		:: is_for_event -> check_process(); handle_death(); is_failed = false
		:: else
		fi;
		if
		:: is_for_event && (is_restarting[0] || IS_ANY_SUSPENDED) -> num_needed = 1; goto to_wait
		:: else -> is_for_event = false
		fi;
#endif
		dispatch();
		if
		:: num_pending == 0 -> break
		:: num_pending > 0 -> num_needed = 1
#if NEED > 1
		:: num_pending > 1 -> num_needed = num_pending
#endif
		fi;
to_wait:
		wait_until_done();
		if
		:: is_left -> is_for_event = false
		:: !is_left && (is_event || is_fault) -> handle()
		:: !is_left && !is_event && !is_fault -> atomic { FOR_ROWS(0, collect_row); rebase() }
		fi;
		atomic { is_left = false; is_event = false; is_fault = false }
	od;
	finish();
died:
	is_over = true
}

#if CALLS
/* Python: _await (pool/replays.py). The thread that waits for the outcomes of repeated calls. A dead worker returns none. */
active proctype Waiter() {
	byte me = RESTARTER;

end_waiting:
	do
	:: atomic { call[0] == OPEN -> call[0] = (gone[0] -> UNANSWERED : ANSWERED) };
#ifndef NO_CALL_NOTIFY
		STEP(is_notified = true);
		ring_pool()
#endif
#if R > 1
	:: atomic { call[1] == OPEN -> call[1] = (gone[0] -> UNANSWERED : ANSWERED) };
		STEP(is_notified = true);
		ring_pool()
#endif
	od;
died:
	skip
}
#endif
#endif
