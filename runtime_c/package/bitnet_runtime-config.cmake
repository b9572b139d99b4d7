# find_package(bitnet_runtime) gives the target bitnet_runtime::bitnet_runtime.
include(CMakeFindDependencyMacro)
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_dependency(Threads)
include("${CMAKE_CURRENT_LIST_DIR}/bitnet_runtime-targets.cmake")
