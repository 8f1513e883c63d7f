#include "pool/openmp_threads.hpp"

#include <bit>
#include <cstdlib>
#include <dlfcn.h>
#include <link.h>
#include <string>
#include <string_view>

#include "shared/cores.hpp"

namespace stepmill {

OpenMpThreads::OpenMpThreads(std::uint32_t num_workers)
    : num_workers_(num_workers), is_left_alone_(std::getenv("GOMP_SPINCOUNT") != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr) {}

// The program may import PyTorch at any time, so it is looked for before the 1st, 2nd, 4th, 8th ... long wait.
void OpenMpThreads::end_idle(std::uint64_t last_wait_ns) noexcept {
    constexpr int PAUSE_SOFT = 1;                     // omp_pause_soft: threads end, settings stay
    constexpr std::uint64_t WORTHWHILE_NS = 200'000;  // a wait of so long for each thread gains more than the starts of threads cost
    if (is_left_alone_ || last_wait_ns < WORTHWHILE_NS) return;
    if (std::has_single_bit(++num_long_waits_)) find_runtimes();
    for (const Runtime& runtime : runtimes_) {
        const auto num_threads = static_cast<std::uint64_t>(runtime.max_threads());
        if (last_wait_ns >= num_threads * WORTHWHILE_NS && num_workers_ + num_threads - 1 > num_cores_) runtime.pause(PAUSE_SOFT);
    }
}

// The names first: dlopen() in the callback would take the dynamic linker's locks in the wrong order.
void OpenMpThreads::find_runtimes() noexcept {
    std::vector<std::string> names;
    auto add_name = [](dl_phdr_info* info, std::size_t, void* found) {
        if (std::string_view(info->dlpi_name).find("libgomp") != std::string_view::npos) static_cast<std::vector<std::string>*>(found)->emplace_back(info->dlpi_name);
        return 0;
    };
    dl_iterate_phdr(add_name, &names);
    runtimes_.clear();
    for (const std::string& name : names) {
        void* library = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
        if (library == nullptr) continue;
        const auto pause = reinterpret_cast<int (*)(int)>(dlsym(library, "omp_pause_resource_all"));  // GCC 9
        const auto max_threads = reinterpret_cast<int (*)()>(dlsym(library, "omp_get_max_threads"));
        if (pause != nullptr && max_threads != nullptr) runtimes_.push_back({pause, max_threads});
    }
    if (!runtimes_.empty()) num_cores_ = static_cast<std::uint32_t>(usable_cores());
}

}  // namespace stepmill
