// How episodes follow each other; mirrors PoolOptions.
#pragma once

namespace stepmill {

enum class Autoreset : int { NEXT_STEP = 0, SAME_STEP = 1, DISABLED = 2 };
enum class Seeding : int { CONTINUE = 0, PER_EPISODE = 1, FIXED = 2 };

}  // namespace stepmill
