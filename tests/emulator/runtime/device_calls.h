// The runtime's interface for emulated kernels: device.h wraps it with the names of ptx.cuh and CUDA.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulate {

// ---- collectives.cpp ----
enum class Kind { b1, s8, u8, s4, u4, f16, bf16, e4m3, e2m1 };
enum class Shuffle { index, exclusive_or, up, down };
uint64_t shuffle(uint64_t value, uint32_t operand, Shuffle how, uint32_t mask, int width);
uint32_t ballot(bool predicate, uint32_t mask, const char* name);
uint32_t reduce_add(uint32_t value, uint32_t mask);
void syncwarp(uint32_t mask);
void barrier(int id, uint32_t threads, bool waits, int line);
void ldmatrix(uint32_t* r, uint32_t address, int count, bool trans);
void stmatrix(uint32_t address, const uint32_t* r, int count, bool trans);
uint32_t movmatrix_trans(uint32_t a);
void mma(const char* name, Kind a_kind, Kind b_kind, void* d, const uint32_t* a, const uint32_t* b);
void mma_sp(const char* name, Kind a_kind, Kind b_kind, void* d, const uint32_t* a, const uint32_t* b,
            uint32_t metadata, int selector);
void mma_nvf4(float* d, const uint32_t* a, const uint32_t* b, uint32_t a_scale, uint32_t b_scale);
void wgmma(const char* name, Kind a_kind, Kind b_kind, int n, void* d, const uint32_t* a, uint64_t a_descriptor,
           uint64_t b_descriptor, bool accumulate);
void wgmma_sp(const char* name, Kind a_kind, Kind b_kind, int n, void* d, const uint32_t* a, uint32_t metadata,
              int selector, uint64_t b_descriptor, bool accumulate);
void wgmma_fence();
void wgmma_commit_group();
void wgmma_wait_group(uint32_t keep);

// ---- numbers.cpp ----
float from_f16(uint16_t v);
float from_bf16(uint16_t v);
float from_e4m3(uint8_t v);
uint16_t to_f16(double v);
uint16_t to_bf16(double v);
uint8_t to_e4m3(float v);
uint16_t extreme(uint16_t a, uint16_t b, uint16_t infinity, bool largest, bool nan_wins);
float add_down(float a, float b);
uint16_t fma_f16(uint16_t a, uint16_t b, uint16_t c);
uint16_t fma_bf16(uint16_t a, uint16_t b, uint16_t c);

// ---- copies.cpp ----
void cp_async(uint32_t shared, const void* global, uint32_t bytes, uint32_t valid);
void cp_async_commit_group();
void cp_async_wait_group(uint32_t keep);
void cp_async_wait_all();
void cp_async_mbarrier_arrive_noinc(uint32_t barrier);
void mbarrier_init(uint32_t address, uint32_t arrivals);
void mbarrier_arrive(uint32_t address, const char* what);
void mbarrier_expect_tx(uint32_t address, uint32_t bytes);
bool mbarrier_test_wait(uint32_t address, uint32_t parity);
void mbarrier_wait(uint32_t address, uint32_t parity);
void fence_proxy_async();
void cp_async_bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier);
void cp_async_bulk_load_multicast(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier,
                                  uint16_t blocks);
void cp_async_bulk_tensor_2d(uint32_t shared, const void* map, int x, int y, uint32_t barrier);
void cp_async_bulk_tensor_2d_multicast(uint32_t shared, const void* map, int x, int y, uint32_t barrier,
                                       uint16_t blocks);
void cp_async_bulk_tensor_store_2d(const void* map, int x, int y, uint32_t shared);
void cp_async_bulk_store(void* global, uint32_t shared, uint32_t bytes);
void cp_async_bulk_commit_group();
void cp_async_bulk_wait_group(uint32_t keep, bool only_read);
void barrier_cluster_arrive(bool orders_memory);
void barrier_cluster_wait();
uint32_t mapa(uint32_t shared, uint32_t rank);
uint32_t cluster_rank();
uint32_t cluster_size();
void st_async(uint32_t cluster, const void* value, uint32_t bytes, uint32_t barrier);
uint32_t shared_address(const void* p);
uint8_t* dynamic_shared();
void read_shared(void* to, uint32_t address, uint32_t bytes, const char* what);
void write_shared(uint32_t address, const void* from, uint32_t bytes, const char* what);
void read_global(void* to, const void* p, uint32_t bytes, const char* what);
void write_global(void* p, const void* from, uint32_t bytes, const char* what);
void check_atomic(const void* p, uint32_t bytes, const char* what);
void spin(const char* what);
void griddepcontrol_wait();
[[noreturn]] void trap();

}  // namespace emulate
