/* The learner with a spare: more servers than envs. Part of wake.pml, in place of the Pool of learner.pml.
 *
 * env 0 is served by server 0, ends ──► server 0 is reset, its result stays in its staging row; the spare serves env 0
 */

#define NO_ENV 255
#define NE (NR - 1)

/* What the learner does. A reset of all drops running commands, assigns every env its own server, drops staged episodes,
 * and then resets all servers, the spare as well.
 */
#define PLAYING 0
#define DRAINING 1
#define CLAIMING 2

/* ---- resets ahead of their time ---------------------------------------------------------------------------------- */

/* C++: stage (spare_queue.cpp), publish_stage (spare_queue.cpp), flush_deferred_resets (spare_queue.cpp): staged and deferred resets. */
#ifdef NO_BEHIND
#define IS_FREE(s_) true
#else
#define IS_FREE(s_) (behind[s_] == 0 && done[s_] == newest_ticket[s_])
#endif
#define IS_IN_USE(s_) (s_ != spare && !TAKES_COMMANDS(env_of[s_]))
#define IS_REST_DUE(s_) (behind[s_] > 0 && done[s_] == PUBLISHED(s_))
#define IS_ANEW_DUE(s_) (is_rebuilt[s_] && behind[s_] == 0)
/* An env that the newest worker has reset, and that lives, must not be reset again. */
#define IS_OF_THE_DEAD(s_) (dead[(s_) / R] || reset_life[s_] != life[(s_) / R])
#define STAGE(s_) is_staged[s_] = true; is_rebuilt[s_] = false; is_to_stage[s_] = true; has_deferred = true
inline flush_deferred_resets() {
	if
	:: has_deferred ->
		atomic { has_deferred = false; s = 0 };
		do
		:: s == NR -> s = 0; break
		:: s < NR ->
			if
			:: atomic { IS_ANEW_DUE(s) ->
					is_rebuilt[s] = false;
					if
					:: is_staged[s] && !IS_IN_USE(s) && done[s] == newest_ticket[s] ->
						assert(IS_OF_THE_DEAD(s));
						STAGE(s)
					:: else
					fi
				}
			:: else
			fi;
			if
			:: atomic { is_to_stage[s] && IS_FREE(s) -> is_to_stage[s] = false; newest_ticket[s]++; is_due = true }
			:: atomic { is_to_stage[s] && !IS_FREE(s) -> is_to_stage[s] = false; newest_ticket[s]++; behind[s]++; has_deferred = true }
			:: atomic { !is_to_stage[s] && IS_REST_DUE(s) -> behind[s]--; is_due = true }
			:: atomic { !is_to_stage[s] && !IS_REST_DUE(s) -> has_deferred = has_deferred || behind[s] > 0 }
			fi;
			if
			:: is_due ->
#ifndef LATE_ROW
				atomic { row[s] = STAGED; kind[s] = RESET };
#endif
				atomic { PUBLISH(s) };
#ifdef LATE_ROW
				atomic { row[s] = STAGED; kind[s] = RESET };
#endif
#ifndef NO_STAGE_RING
				ring_worker(s / R);
#endif
#if KILLS && !defined(NO_STAGE_DEATHS)
				check_deaths_of(s / R);
#endif
				is_due = false  /* and again: it may be done by now */
			:: else -> s++
			fi
		od
	:: !has_deferred
	fi
}

/* C++: swap_in_spare (pool_state.cpp), is_gone (spare_queue.cpp), attach (pool_state.cpp), swap_in (spare_queue.cpp). The env's episode is over. */
#define HAS_LOST(s_) ((is_restarting[(s_) / R] || dead[(s_) / R]) && behind[s_] == 0 && done[s_] == newest_ticket[s_])
inline swap_in_spare() {
	s = server[e]; server[e] = spare; env_of[spare] = e; spare = s; env_of[s] = NO_ENV; must_begin_episode[e] = false;
	STAGE(s);
	s = server[e];
	if
	:: !is_staged[s] -> STAGE(s)
	:: is_staged[s] && !is_to_stage[s] && HAS_LOST(s) -> assert(IS_OF_THE_DEAD(s)); STAGE(s)
	:: else
	fi
}

/* C++: mark_rebuilt (spare_queue.cpp). The object of the staged episode is gone. */
#define NOTE_REBUILT_SERVER(s_) \
	if :: is_staged[s_] && done[s_] == newest_ticket[s_] && behind[s_] == 0 -> is_rebuilt[s_] = true; has_deferred = true :: else fi

/* ---- commands ---------------------------------------------------------------------------------------------------- */

/* C++: use_staged (pool_state.cpp), release_staged (pool_state.cpp). Nothing is written. */
#define TAKE_STAGED is_taking[e] = true; must_begin_episode[e] = false; move_env(e, PENDING); num_pending++

/* C++: dispatch (send.cpp), send_reset (send.cpp). The command words come before the ticket. */
inline dispatch() {
	do
	:: e == NE -> e = 0; break
	:: atomic { e < NE && !is_reset && TAKES_COMMANDS(e) && is_staged[server[e]] -> TAKE_STAGED; e++ }
	:: atomic {
			e < NE && (is_reset || (TAKES_COMMANDS(e) && !is_staged[server[e]])) ->
			assert(status[e] != PENDING);
			move_env(e, PENDING); num_pending++; s = server[e]; is_staged[s] = false;
			row[s] = e; kind[s] = (is_reset || must_begin_episode[e] -> RESET : FORWARD); must_begin_episode[e] = false
		};
		atomic { newest_ticket[s]++; PUBLISH(s); is_touched[s / R] = true; s = 0; e++ }
	:: e < NE && !is_reset && !TAKES_COMMANDS(e) -> e++
	od;
	ring_all_touched();
	check_deaths();
	atomic { is_touched[0] = false; is_touched[W - 1] = false }
}

/* ---- results ----------------------------------------------------------------------------------------------------- */

/* C++: mark_received (gather.cpp), copy_staged (spare_queue.cpp), discard_results (recovery.cpp), mark_faulted (recovery.cpp) */
#define HAS_RESULT (status[e] == PENDING && done[server[e]] == newest_ticket[server[e]])
#define DROP_STAGED if :: is_taking[e] -> is_taking[e] = false; is_staged[s] = false :: else fi
inline collect() {
	do
	:: atomic { e == NE -> e = 0; s = 0; rebase(); break }
	:: atomic { e < NE && !HAS_RESULT -> e++ }
	:: atomic { e < NE && HAS_RESULT && fault[server[e]] == NONE ->
			s = server[e];
			assert(data[s] == newest_ticket[s] && last_result[s] == newest_ticket[s] && last_fault[s] < newest_ticket[s]);
			assert(wrote[s] == (is_taking[e] -> STAGED : e));
			is_step = !is_taking[e] && kind[s] == FORWARD;
			move_env(e, IDLE);
			RECEIVE(s);
			DROP_STAGED;
			if
			:: is_step && mode == PLAYING && overs -> overs--; swap_in_spare()
			:: true
			fi;
			is_step = false; e++
		}
	:: atomic { e < NE && HAS_RESULT && fault[server[e]] != NONE ->
			s = server[e];
			assert(last_fault[s] == newest_ticket[s] && last_result[s] < newest_ticket[s]);
			move_env(e, FAULTED);
			RECEIVE(s);
			DROP_STAGED;
			e++
		}
	od
}

/* C++: mark_lost (recovery.cpp). An idle env reports it with its next command. */
#define IS_WELL(e_) (TAKES_COMMANDS(e_) || (status[e_] == PENDING && done[server[e_]] == newest_ticket[server[e_]] && fault[server[e_]] == NONE))
#define IS_BEGUN(e_) (is_staged[server[e_]] && TAKES_COMMANDS(e_))
inline mark_lost(e_) {
	if
	:: server[e_] / R == v && IS_WELL(e_) && IS_BEGUN(e_) && (is_to_stage[server[e_]] || done[server[e_]] != newest_ticket[server[e_]])
	:: server[e_] / R == v && IS_WELL(e_) && IS_BEGUN(e_) && !is_to_stage[server[e_]] && done[server[e_]] == newest_ticket[server[e_]] ->
		is_staged[server[e_]] = false; must_begin_episode[e_] = true
	:: server[e_] / R == v && IS_WELL(e_) && !IS_BEGUN(e_) -> must_begin_episode[e_] = true
	:: else
	fi
}

/* A faulted env is reset if its worker is alive or being restarted. C++: resolve_fault (recovery.cpp). */
inline reset_faulted() {
	do
	:: atomic { e == NE -> e = 0; v = 0; break }
	:: atomic {
			e < NE && status[e] == FAULTED && (!dead[server[e] / R] || is_restarting[server[e] / R]) ->
			move_env(e, NEW); must_begin_episode[e] = true; e++
		}
#if REVIVES
	:: atomic {
			e < NE && status[e] == FAULTED && dead[server[e] / R] && !is_restarting[server[e] / R] && revives ->
			v = server[e] / R;
			mark_lost(0);
#if NR > 2
			mark_lost(1);
#endif
			revives--; BEGIN_RESTART(v); move_env(e, NEW); must_begin_episode[e] = true; e++
		}
#endif
	:: atomic { e < NE && !(status[e] == FAULTED && (!dead[server[e] / R] || is_restarting[server[e] / R] || revives)) -> e++ }
	od
}

/* C++: reset_server_order (pool_state.cpp) */
#define RESTORE(e_) server[e_] = e_; env_of[e_] = e_
inline reset_server_order() {
	RESTORE(0);
#if NR > 2
	RESTORE(1);
#endif
	spare = NE; env_of[NE] = NO_ENV
}

active proctype Pool() {
	byte status[NR] = IDLE;
	byte server[NE], env_of[NR];
	bool is_taking[NE], must_begin_episode[NE], is_to_stage[NR];
	byte me = LEARNER, revives = REVIVES, retries = RETRIES, resets = RESETS, rounds, overs = OVERS, spare, mode = CLAIMING;
	byte num_pending, num_needed, num_ready, r, v, t, s, e, old, num_aborted, counted, armed;
	bool is_touched[W];
	bool is_gone, is_fault, is_event, is_rung, is_step, is_due, is_reset;

	atomic {
		if
		:: EAGER > 0 -> eager = true
		:: EAGER != 1
		fi;
		reset_server_order();
		run Worker(0, 0);
#if W > 1
		run Worker(1, 1)
#endif
	};
	do
	:: mode == PLAYING && num_pending == 0 && rounds == T -> break
	:: else ->
		flush_deferred_resets();
		/* C++: stage_all (spare_queue.cpp). Python: release_staged (pool/resets.py) */
		if
		:: mode == PLAYING && rounds < T -> rounds++; dispatch()
		:: atomic { mode == PLAYING && rounds < T && resets -> resets--; rounds++; mode = DRAINING }
		:: mode == PLAYING && num_pending > 0
		:: mode != PLAYING && num_pending > 0
		:: atomic { mode == DRAINING && num_pending == 0 ->
				reset_server_order();
				mode = CLAIMING;
				do
				:: e == NE -> e = 0; break
				:: e < NE && is_staged[server[e]] -> TAKE_STAGED; e++
				:: e < NE && !is_staged[server[e]] -> e++
				od
			}
		:: atomic { mode == CLAIMING && num_pending == 0 -> mode = PLAYING; is_reset = true };
			dispatch();
			atomic { STAGE(NE); is_reset = false }
		fi;
		if
		:: num_pending == 0 -> num_needed = 0
		:: num_pending > 0 && mode == PLAYING -> num_needed = 1
		:: num_pending > 0 && (mode != PLAYING || num_pending > 1) -> num_needed = num_pending
		fi;
		if
		:: num_needed -> wait_until_done();
#if REVIVES
			if
			:: is_event || is_fault -> handle_restarts()
			:: !is_event && !is_fault
			fi;
#endif
			collect()
		:: else
		fi;
		reset_faulted();
		atomic { is_event = false; is_fault = false }
	od;
	finish();
died:
	is_over = true
}
