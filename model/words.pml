/* The shared words of protocol.hpp and the functions that change them.
 *
 * STEP(…) is one access to shared memory, with the local computations around it. All interleavings of steps are
 * searched, and a worker may die at any step.
 *
 * `C++:` above a step names the functions that it mirrors; scripts/check_model_names.py looks each one up.
 * Code under #ifdef NO_x, LATE_x, EARLY_x … is a mutant: model/check.py builds each one, and each must fail.
 */

#ifndef W
#define W 2             /* workers */
#endif
#ifndef R
#define R 1             /* rows (servers) of a worker */
#endif
#ifndef T
#define T 2             /* commands per row */
#endif
#ifndef KILLS
#define KILLS 0         /* workers that die at any point */
#endif
#ifndef LIMITS
#define LIMITS 0        /* looks of the reaper that may find a command overdue */
#endif
#ifndef LANES
#define LANES 0         /* 1: the worker is one thread of several in its process, and another one may be overdue at any look */
#endif
#ifndef HANGS
#define HANGS 0         /* commands that never end */
#endif
#ifndef STOPS
#define STOPS 0         /* workers that are stopped at any point (SIGSTOP), and never go on */
#endif
#ifndef SPARES
#define SPARES 0        /* 1: one server more than envs; T: rounds of commands, RESETS: of them resets of all */
#endif
#ifndef RESETS
#define RESETS 0
#endif
#ifndef OVERS
#define OVERS T         /* episodes that end */
#endif
#ifndef SCRIBBLES
#define SCRIBBLES 0     /* workers that overwrite their words with invalid values as they die */
#endif
#ifndef LIVES
#define LIVES 0         /* 1: each command records for which of a worker's successors it was given */
#endif
#ifndef MORTAL
#define MORTAL 1        /* 1: a worker that is given up may be killed at any point, 0: it is a thread and continues */
#endif
#ifndef REVIVES
#define REVIVES 0       /* dead workers that are restarted, or not: a restart may fail */
#endif
#ifndef RETRIES
#define RETRIES 0       /* restarts that follow one that failed */
#endif
#ifndef LATE_FAILS
#define LATE_FAILS 0    /* restarts that fail although the new worker has begun to serve */
#endif
#ifndef AWAITS
#define AWAITS 0        /* 1: the learner may wait only for restarts and replays, without giving commands */
#endif
#ifndef INTERRUPTS
#define INTERRUPTS 0    /* how often Ctrl-C ends a wait of the learner, which then waits again */
#endif
#ifndef REPLAYS
#define REPLAYS 0       /* 1: episodes are replayed after a restart */
#endif
#ifndef TRUNCATES
#define TRUNCATES 0     /* 1: with REPLAYS, they are cut short instead */
#endif
#ifndef CALM
#define CALM 0          /* 1: a worker sleeps before it dies, and no commands are given; no restart fails. Other bounds cover the rest */
#endif
#ifndef DEVIATIONS
#define DEVIATIONS 0    /* results of replays that differ from the logged ones */
#endif
#ifndef CALLS
#define CALLS 0         /* 1: a call is repeated at the end of a replay, and a thread waits for its outcome */
#endif
#ifndef OVERLAP
#define OVERLAP 0       /* resets that a worker begins before a command asks for them */
#endif
#ifndef REQUESTS
#define REQUESTS 0      /* slow requests */
#endif
#ifndef CLOSERS
#define CLOSERS 0       /* threads that close the pool under the caller */
#endif
#ifndef ENDS
#define ENDS CLOSERS    /* 1: the pool is closed at the end, and every worker ends; 0: workers may sleep in the end */
#endif
#ifndef SPURIOUS
#define SPURIOUS 0      /* returns from a futex without a ring: signals, ends of slices */
#endif
#ifndef SLICES
#define SLICES 0        /* ends of the slices in which the learner sleeps, when nothing else can happen */
#endif
#ifndef EARLY_SLICES
#define EARLY_SLICES 0  /* ends of slices at any time */
#endif
#ifndef WATCHES
#define WATCHES 0       /* 1: an event loop of the learner waits, and its other tasks give commands meanwhile */
#endif
#ifndef COROUTINES
#define COROUTINES 0    /* 1: workers run several commands at a time, and event loops wait for their bells */
#endif
#ifndef SPINNERS
#define SPINNERS 0      /* max_spinners; 0: no thread spins */
#endif
#ifndef NEED
#define NEED 2          /* how many results the learner waits for: 1: one, 2: one or all that are pending */
#endif
#ifndef EAGER
#define EAGER 2         /* 0: count after a group, 1: after each result, 2: either */
#endif

#if LIMITS && !MORTAL
#define THREADS 1       /* the worker is a thread: it cannot be killed, and ends by itself when it is given up */
#else
#define THREADS 0
#endif

#define NR (W * R)
#define ROW(w, l) ((w) * R + (l))

/* Row states: ticket << 2 | phase. */
#define RUNNING 1
#define PUBLISHING 2
#define ABORTED 3
#define STATE(ticket_, phase_) ((ticket_) * 4 + phase_)
#define STATE_TICKET(word_) ((word_) / 4)
#define STATE_PHASE(word_) ((word_) % 4)

/* Faults, and what WorkerControl::dead says. */
#define NONE 0
#define DIED 1
#define OVERDUE 2
#define NEIGHBOUR 3

#define NO_SERVER 255
#define NOBODY 255

/* What a worker is doing. */
#define COMMAND 1
#define EARLY 2

/* PoolControl. Each bell has one sleeper: only whether the bell has moved since that thread read it matters, and that is modelled. */
byte count, ring_at;
bool bell, parked, asleep;               /* asleep: in the kernel's queue */
bool event;                              /* the eventfd is readable; with WATCHES, `parked` means ON_EVENT */
bool eager;
byte before[W + 3] = 255;                /* value of count when a thread added to it; 255: the thread has read ring_at since */
byte spinners;                           /* one bit per worker, and the learner's */

/* WorkerControl */
byte requests[W], running[W], current[W] = NO_SERVER, progress[W], dead[W];
bool worker_bell[W], worker_parked[W], worker_asleep[W], stop[W];

/* ServerWords */
byte ticket[NR], state[NR], fault[NR], done[NR];
byte data[NR];                           /* all result bytes of a row: the ticket they belong to, 0 while they are written */
byte unseen[NR];                         /* a done word in its writer's store buffer, 0: none */

/* Outside of shared memory */
bool gone[W + 3];                        /* the pidfd is readable: nothing more is executed. Never true for the learner's threads */
bool sigkill[W], hung[W], exited[W], ended[W], respawn[W];
bool frozen[W + 3];                     /* lives but executes nothing. Only workers */
byte hangs = HANGS;
byte slices = SLICES;
bool reaped[W];
byte stuck[W] = NO_SERVER;               /* Watched::stuck: the server whose publishing never ends */
byte newest_ticket[NR];                  /* the ticket of EnvRecord, or of CommandWriter */
bool mutex;                              /* Reaper::mutex_ */
bool is_watched[W] = true;
byte generation[W];
bool is_restarting[W];                   /* CommandWriter::is_restarting_: commands are for the next worker, and get their tickets at the end of the restart */
byte order = NOBODY;                     /* the worker that a restart task is to restart */
bool is_task_done[W], is_task_good[W];   /* its outcome: RestartTask */
bool is_notified;                        /* PoolState::is_notified_ */
byte interrupts = INTERRUPTS;
bool is_closed, is_over;
byte spurious = SPURIOUS;
byte request_row[W], request_after[W];   /* the mailbox */
byte num_posted[W], replies[W];

/* Ghosts: what the assertions remember */
byte executed[NR];                       /* ticket of the last command whose env.step began */
byte last_result[NR];                    /* ticket of the last result that its owner published */
byte last_fault[NR];                     /* ticket of the last command that a fault ended */
byte began_at[NR];                       /* the worker's progress when the running command began */
byte early_at[W];                        /* the worker's progress when the last early reset began */

#if LIVES
byte life[W], addressee[NR];             /* how often a restart of a worker was begun; the successor for which a command is meant */
#define RENEW(w_) life[w_]++
#define BE_RENEWED my_life = life[w]
#define ADDRESS(r_) addressee[r_] = life[(r_) / R]
#define IS_ADDRESSED(r_) (addressee[r_] == my_life)
#else
#define RENEW(w_) skip
#define BE_RENEWED skip
#define ADDRESS(r_) skip
#define IS_ADDRESSED(r_) true
#endif
#if SCRIBBLES
bool scribbled[NR];                      /* of such a row only the end of its command is certain */
byte mortal[NR];                         /* the command that was outstanding when its worker died */
#define IS_SCRIBBLED(r_) scribbled[r_]
#define SET_SCRIBBLED(r_, is_) scribbled[r_] = is_
#define NOTE_MORTAL(r_) mortal[r_] = newest_ticket[r_]
#ifdef NO_LOST_WITH
#define IS_LOST(r_) false
#else
#define IS_LOST(r_) (mortal[r_] == newest_ticket[r_])
#endif
#else
#define IS_SCRIBBLED(r_) false
#define SET_SCRIBBLED(r_, is_) skip
#define NOTE_MORTAL(r_) skip
#define IS_LOST(r_) false
#endif
#if SPARES
#define STAGED 9                         /* a staging row, for results that no command has asked for */
#define FORWARD 0
#define RESET 1
byte row[NR], kind[NR];                  /* the row that the result goes to; the kind of command */
byte wrote[NR], reset_life[NR] = 255;    /* the row of the newest result; which of the workers has reset the env last */
bool is_staged[NR], is_rebuilt[NR], has_deferred;  /* of SpareQueue */
byte behind[NR];
#define PUBLISHED(r_) (newest_ticket[r_] - behind[r_])
#define SERVER(e_) server[e_]
#else
#define PUBLISHED(r_) newest_ticket[r_]
#define SERVER(e_) e_
#endif
/* C++: move (env_table.hpp). The phases of an env, and every move between them, are those of phases.def. */
mtype = {
#define ENV_PHASE(name) name,
#define OBJECT_PHASE(name) name,
#include "../src/stepmill/_native/pool/phases.def"
	NO_PHASE
};
inline move_env(r_, to_) {
	assert(status[r_] == to_
#define ENV_MOVE(from, to) || (status[r_] == from && to_ == to)
#include "../src/stepmill/_native/pool/phases.def"
	);
	status[r_] = to_
}
inline move_object(r_, to_) {
	assert(phase[r_] == to_
#define OBJECT_MOVE(from, to) || (phase[r_] == from && to_ == to)
#include "../src/stepmill/_native/pool/phases.def"
	);
	phase[r_] = to_
}
#define TAKES_COMMANDS(r_) (status[r_] == IDLE || status[r_] == NEW)

#if REPLAYS
#define FORWARD 0
#define RESET 1
byte kind[NR];                           /* the kind of command */
byte at[NR];                             /* how much of its episode an env object has done: 0 nothing, 1 reset, 2 one step … */
byte place[NR];                          /* of the newest result: `at` when it was made */
byte phase[NR] = CURRENT;                /* ObjectPhase; that an object is LOST or RENEWED is in must_begin_episode */
byte deviations = DEVIATIONS;
bool has_calls[W] = true;                /* its env objects have got their calls, or have lost none */
bool has_news;                           /* a replay has ended while the learner waited for that alone */
byte event[NR], call[NR];                /* SuspendedEnvs::events_; the future of a call that is repeated after the last step */
#define NO_EVENT 0
#define PLAYED 1
#define DIFFERS 2
#define FAULT 3
#define NO_CALL 0
#define OPEN 1
#define ANSWERED 2
#define UNANSWERED 3
#define IS_ANY_REPLAYING (phase[0] == REPLAYING || phase[NR - 1] == REPLAYING)
#define IS_ANY_EVENT (event[0] || event[NR - 1] || has_news)
#define IS_ANY_SUSPENDED (IS_IN_REPLAY(0) || IS_IN_REPLAY(NR - 1))
#define IS_IN_REPLAY(r_) (phase[r_] != CURRENT)
#else
#define IS_IN_REPLAY(r_) false
#endif

#define BIT(seat_) (1 << (seat_))
#define PARENT_SEAT W
#define POPCOUNT(bits_) (((bits_) & 1) + (((bits_) >> 1) & 1) + (((bits_) >> 2) & 1))

#define LEARNER W        /* `me` of the caller and of close(), which never count at the same time */
#define REAPER (W + 1)
#define RESTARTER (W + 2)

/* STEP(…): a step. if :: WHEN(a) -> … :: WHEN(!a) -> … OR_DIE fi: a step that reads and branches. */
#if KILLS || LIMITS
#if STOPS
#define RUNS !gone[me] && !frozen[me]
#define IS_GONE (gone[me] || (frozen[me] && is_over))
#else
#define RUNS !gone[me]
#define IS_GONE gone[me]
#endif
#define STEP(...) if :: atomic { RUNS -> __VA_ARGS__ } :: IS_GONE -> goto died fi
#define WHEN(condition_) RUNS && (condition_)
#define OR_DIE :: IS_GONE -> goto died
#else
#define STEP(...) atomic { __VA_ARGS__ }
#define WHEN(condition_) (condition_)
#define OR_DIE
#endif

/* The effect of a locked instruction on the stores before it. */
#ifdef TSO
#define DRAIN_ROW(r_) if :: unseen[r_] -> done[r_] = unseen[r_]; unseen[r_] = 0 :: else fi
#define STORE_DONE(r_, t_) unseen[r_] = t_
#else
#define DRAIN_ROW(r_) skip
#define STORE_DONE(r_, t_) done[r_] = t_
#endif
#if R > 1
#define DRAIN(w_) DRAIN_ROW(ROW(w_, 0)); DRAIN_ROW(ROW(w_, 1))
#else
#define DRAIN(w_) DRAIN_ROW(ROW(w_, 0))
#endif
#define DRAIN_OWN if :: me < W -> DRAIN(me) :: else fi

/* ---- doorbells --------------------------------------------------------------------------------------------------- */

/* C++: ring (protocol.hpp), futex_wake_all (platform.hpp) */
inline ring(bell_, parked_, asleep_) {
#ifdef LATE_BUMP
	if
	:: WHEN(parked_) -> STEP(bell_ = true); STEP(asleep_ = false)
	:: WHEN(!parked_) -> STEP(bell_ = true)
	OR_DIE
	fi
#else
#ifndef NO_BUMP
	STEP(bell_ = true);
#endif
#ifdef NO_WAKE
	skip
#else
	if
	:: WHEN(parked_) -> STEP(asleep_ = false)
	:: WHEN(!parked_)
	OR_DIE
	fi
#endif
#endif
}

/* C++: ring_worker (protocol.hpp) */
inline ring_worker(w_) { ring(worker_bell[w_], worker_parked[w_], worker_asleep[w_]) }

/* C++: ring_pool (protocol.hpp), set_event (platform.hpp) */
#if !WATCHES
inline ring_pool() { ring(bell, parked, asleep) }
#else
inline ring_pool() {
#ifdef LATE_EVENT_BUMP
	if
	:: WHEN(parked) -> STEP(bell = true); STEP(event = true)
	:: WHEN(!parked) -> STEP(bell = true)
	OR_DIE
	fi
#else
	STEP(bell = true);
	if
#ifdef NO_EVENT
	:: WHEN(parked)
#else
	:: WHEN(parked) -> STEP(event = true)
#endif
	:: WHEN(!parked)
	OR_DIE
	fi
#endif
}
#endif

/* C++: count_results (protocol.hpp). Like every locked instruction it empties the store buffer of its thread. */
#ifdef EQUAL_RING_AT
#define IS_CROSSED(group_) (before[me] + group_ == ring_at)
#else
#define IS_CROSSED(group_) (before[me] < ring_at && ring_at <= before[me] + group_)
#endif
inline count_results(group_) {
#ifdef EARLY_RING_AT
	if
	:: atomic { WHEN(count < ring_at && ring_at <= count + group_) -> before[me] = 255 };
		STEP(DRAIN_OWN; count = count + group_);
		ring_pool()
	:: WHEN(!(count < ring_at && ring_at <= count + group_)) -> STEP(DRAIN_OWN; count = count + group_)
	OR_DIE
	fi
#else
	STEP(DRAIN_OWN; before[me] = count; count = count + group_);
	if
	:: atomic { WHEN(IS_CROSSED(group_)) -> before[me] = 255 };
		ring_pool()
	:: atomic { WHEN(!IS_CROSSED(group_)) -> before[me] = 255 }
	OR_DIE
	fi
#endif
}

/* C++: park (protocol.hpp), futex_wait (platform.hpp). The kernel compares, and queues the thread, in one step. */
inline sleep(bell_, parked_, asleep_) {
#ifdef NO_COMPARE
	STEP(asleep_ = true);
#else
	STEP(asleep_ = !bell_);
#endif
#ifdef LATE_PARKED
	STEP(parked_ = true);
#endif
	if
	:: WHEN(!asleep_)
	:: is_over -> goto died  /* the learner has all results */
#if SPURIOUS
	:: atomic { WHEN(spurious && asleep_) -> spurious--; asleep_ = false }
#endif
#if INTERRUPTS
	:: atomic { WHEN(me == LEARNER && interrupts && asleep_) -> asleep_ = false }  /* what follows: wait_until_done() */
#endif
	OR_DIE
	fi
}

inline park(bell_, parked_, asleep_) {
#ifndef LATE_PARKED
	STEP(parked_ = true);
#endif
#ifdef NO_SECOND_LOOK
	sleep(bell_, parked_, asleep_);
#else
	if
	:: WHEN(!bell_) -> sleep(bell_, parked_, asleep_)
	:: WHEN(bell_)
	OR_DIE
	fi;
#endif
	STEP(parked_ = false)
}

/* ---- spinning ---------------------------------------------------------------------------------------------------- */

/* C++: acquire_spin (protocol.hpp), release_spin (protocol.hpp), spin_for (protocol.hpp) */
#define MAY_SPIN(seat_) (POPCOUNT(spinners) < SPINNERS && !(spinners & BIT(seat_)))
inline spin_for(seat_, bell_) {
	if
#ifdef TORN_PERMIT
	:: WHEN(MAY_SPIN(seat_)) ->
		STEP(spinners = spinners | BIT(seat_); assert(POPCOUNT(spinners) <= SPINNERS));
#else
	:: atomic { WHEN(MAY_SPIN(seat_)) -> spinners = spinners | BIT(seat_) };
#endif
		STEP(is_rung = bell_);
#ifdef NO_RELEASE
		skip
#else
		STEP(spinners = spinners & (255 - BIT(seat_)))
#endif
	:: WHEN(!MAY_SPIN(seat_))
	OR_DIE
	fi
}
