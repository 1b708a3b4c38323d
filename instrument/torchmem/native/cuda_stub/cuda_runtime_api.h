// The few declarations that torch's c10/cuda headers name, so that the source of CUDA events compiles on a host
// without the CUDA toolkit. Nothing here is called or linked: the allocator is reached through a virtual method.
#pragma once
#include <cstddef>

#define CUDART_VERSION 12000
#define CUDA_VERSION 12000
#define cudaStreamDefault 0

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef struct CUgraph_st* cudaGraph_t;
typedef struct CUgraphExec_st* cudaGraphExec_t;
typedef struct CUgraphNode_st* cudaGraphNode_t;
typedef struct CUuserObject_st* cudaUserObject_t;
typedef void (*cudaHostFn_t)(void*);
struct cudaDeviceProp;

typedef enum cudaError { cudaSuccess = 0, cudaErrorNotReady = 600 } cudaError_t;
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone,
  cudaStreamCaptureStatusActive,
  cudaStreamCaptureStatusInvalidated
};
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed
};
enum cudaMemcpyKind { cudaMemcpyHostToHost };
enum { cudaUserObjectNoDestructorSync = 1, cudaGraphUserObjectMove = 1 };
struct cudaIpcEventHandle_t {
  char reserved[64];
};
struct cudaIpcMemHandle_t {
  char reserved[64];
};

extern "C" {
cudaError_t cudaMemGetInfo(size_t*, size_t*);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t);
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus*, unsigned long long*);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*);
cudaError_t cudaStreamQuery(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaEventQuery(cudaEvent_t);
cudaError_t cudaDeviceGetStreamPriorityRange(int*, int*);
}
template <class... Args>
cudaError_t cudaMemcpyAsync(Args...);
template <class... Args>
cudaError_t cudaStreamGetPriority(Args...);
template <class... Args>
cudaError_t cudaStreamGetCaptureInfo_v2(Args...);
template <class... Args>
cudaError_t cudaUserObjectCreate(Args...);
template <class... Args>
cudaError_t cudaGraphRetainUserObject(Args...);
template <class... Args>
cudaError_t cudaUserObjectRelease(Args...);
